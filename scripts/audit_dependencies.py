"""Audit the Python environment that runs this: what is installed is on the index and not withdrawn, and agrees.

    python scripts/audit_dependencies.py [--strict] [--out build/dependency-audit.json]

Asked of every installed package: does the index have this release, and have its authors withdrawn it (PEP 592); are its
requirements met (`pip check`); may its licence stand beside Apache-2.0; does OSV, the database of pip-audit, know a
vulnerability of it. What could not be asked is said in a line; with --strict that is a failure too.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from packaging.utils import InvalidSdistFilename, InvalidWheelFilename, parse_sdist_filename, parse_wheel_filename
from packaging.version import Version

OWN = "pagedweight"
INDEX = "https://pypi.org/simple"
ADVISORIES = "https://api.osv.dev/v1/querybatch"
LISTING = "application/vnd.pypi.simple.v1+json"
# As packages write them: SPDX, classifiers, free text. None asks more of Apache-2.0 code beside it than a notice.
LICENCES = re.compile(
    r"(the )?(apache( software|[- ]2\.0)?( license)?( 2\.0)?|mit(-cmu)?|0?bsd([- ][0-9]-clause)?|isc|iscl|psf-2\.0|"
    r"python software foundation|zlib|cc0-1\.0|bsl-1\.0|cnri-python|mpl[- ]2\.0|mozilla public license 2\.0|hpnd|"
    r"unlicense|public domain|lgpl-[23]\.[01]-(only|or-later)|gnu (library or )?lesser general public license.*)"
    r"( license)?",
    re.IGNORECASE,
)
# Known, without a release that mends them, and out of this library's reach.
ACCEPTED = {
    "GHSA-4j2p-28q2-5m79": "accelerate's load_checkpoint_in_model, which nothing here calls",
}


class Audit(NamedTuple):
    """findings: what must be mended; unasked: what nobody could say."""

    findings: list[str]
    unasked: list[str]


def name_of(package: Distribution) -> str:
    return re.sub(r"[-_.]+", "-", package.name).lower()


def ask(url: str, body: Any = None, accept: str = "application/json") -> Any:
    """JSON of an address; OSError when there is no answer."""
    content = None if body is None else json.dumps(body).encode()
    asked = Request(url, content, {"Accept": accept, "Content-Type": "application/json"})
    with urlopen(asked, timeout=20) as answer:
        return json.loads(answer.read())


def version_of(file: str) -> Version | None:
    try:
        return parse_wheel_filename(file)[1] if file.endswith(".whl") else parse_sdist_filename(file)[1]
    except (InvalidSdistFilename, InvalidWheelFilename):
        return None


def release(package: Distribution, index: str) -> Audit:
    """Whether the index has it (a build's own suffix, as in 2.13.0+cpu, aside), and any file that still stands."""
    told, wanted = f"{package.name} {package.version}", Version(Version(package.version).public)
    try:
        files = ask(f"{index}/{name_of(package)}/", accept=LISTING)["files"]
    except HTTPError as error:
        if error.code == 404:
            return Audit([f"{told}: the index knows no such package"], [])
        return Audit([], [f"{told} was not looked up: {error}"])
    except (OSError, ValueError) as error:
        return Audit([], [f"{told} was not looked up: {error}"])
    found = [file.get("yanked", False) for file in files if version_of(file["filename"]) == wanted]
    if not found:
        return Audit([f"{told}: the index has no such release"], [])
    return Audit([f"{told} was withdrawn by its authors: {found[0]}"] if all(found) else [], [])


def stated_licence(package: Distribution) -> str:
    """The SPDX expression, else classifiers, else the first line of the free text."""
    said = package.metadata
    kinds = [kind.split(" :: ")[-1] for kind in said.get_all("Classifier", []) if kind.startswith("License ::")]
    plain = [re.sub(r" \(.+\)$", "", kind) for kind in kinds if kind not in ("OSI Approved", "DFSG approved")]
    named = " AND ".join(plain)
    return said.get("License-Expression") or named or next(iter((said.get("License") or "").splitlines()), "")


def licence(package: Distribution) -> Audit:
    stated = stated_licence(package)
    if not stated:
        return Audit([], [f"{package.name} {package.version} states no licence"])
    joined = re.split(r"(?i)\s+and\s+|;", re.sub(r"[()]|\bWITH\s+\S+", " ", stated))
    fine = all(
        any(map(LICENCES.fullmatch, (part.strip(), *re.split(r"(?i)\s+or\s+", part.strip())))) for part in joined
    )
    return Audit([] if fine else [f"{package.name} {package.version}: look at its licence, {stated!r}"], [])


def advisories(packages: list[Distribution], service: str) -> Audit:
    pairs = [(name_of(package), Version(package.version).public) for package in packages]
    queries = [{"package": {"name": name, "ecosystem": "PyPI"}, "version": version} for name, version in pairs]
    try:
        answers = ask(service, {"queries": queries})["results"]
    except (OSError, ValueError) as error:
        return Audit([], [f"known vulnerabilities were NOT checked: no answer from {service} ({error})"])
    known = [
        (f"{name} {version}", entry["id"])
        for (name, version), answer in zip(pairs, answers, strict=True)
        for entry in answer.get("vulns", [])
    ]
    return Audit([f"{told}: {entry}" for told, entry in known if entry not in ACCEPTED], [])


def requirements() -> Audit:
    ran = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True)
    return Audit((ran.stdout or ran.stderr).splitlines() if ran.returncode else [], [])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--index", default=INDEX, help="a PEP 691 index")
    parser.add_argument("--advisories", default=ADVISORIES, help="where OSV's batches are answered")
    parser.add_argument("--strict", action="store_true", help="what could not be asked fails too")
    parser.add_argument("--out", type=Path, help="write a record")
    options = parser.parse_args()
    installed = {name_of(one): one for one in distributions() if name_of(one) != OWN}
    packages = [installed[name] for name in sorted(installed)]
    with ThreadPoolExecutor(8) as threads:
        told = list(threads.map(lambda package: release(package, options.index.rstrip("/")), packages))
    told += [*map(licence, packages), requirements(), advisories(packages, options.advisories)]
    findings, unasked = ([line for audit in told for line in audit[part]] for part in (0, 1))
    print(f"{len(packages)} packages, {len(findings)} findings, {len(unasked)} left unasked")
    print(*findings, *unasked, sep="\n")
    if options.out is not None:
        record = {
            "command": "python scripts/audit_dependencies.py",
            "date": f"{datetime.now(UTC):%Y-%m-%d}",
            "packages": {name: installed[name].version for name in sorted(installed)},
            "licences": {name: stated_licence(installed[name]) for name in sorted(installed)},
            "findings": findings,
            "unasked": unasked,
        }
        options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 1 if findings or (options.strict and unasked) else 0


if __name__ == "__main__":
    sys.exit(main())
