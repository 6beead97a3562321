"""The audit of what is installed, against an index and an advisory service that answer as told."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import Distribution, distributions
from pathlib import Path

import pytest

from scripts import audit_dependencies as script


def file(name: str, yanked: bool | str = False) -> dict[str, object]:
    return {"filename": name, "url": name, "hashes": {}, "yanked": yanked}


FILES = {
    "good": [file("good-1.0-py3-none-any.whl"), file("good-2.0.tar.gz", "not this one")],
    "partly": [file("partly-1.0.tar.gz", True), file("partly-1.0-py3-none-any.whl")],
    "withdrawn": [file("withdrawn-1.0.tar.gz", "leaks"), file("withdrawn-1.0-py3-none-any.whl", True)],
    "with-a-name": [file("with_a.name-1.0+local.zip"), file("no version at all"), file("With_A.Name-1.0.0.tar.gz")],
    "old": [file("old-0.9.tar.gz")],
}


class Service(BaseHTTPRequestHandler):
    known: dict[str, list[str]] = {}  # noqa: RUF012  what the advisory service says, by package

    def do_GET(self) -> None:
        name = self.path.split("/")[2]
        self._answer(404 if name not in FILES else 200, {"files": FILES.get(name)})

    def do_POST(self) -> None:
        queries = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["queries"]
        assert {query["package"]["ecosystem"] for query in queries} == {"PyPI"}
        found = [self.known.get(query["package"]["name"], []) for query in queries]
        self._answer(200, {"results": [{"vulns": [{"id": one} for one in ids]} if ids else {} for ids in found]})

    def _answer(self, status: int, body: object) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_: object) -> None:
        return None


@pytest.fixture
def address() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Service)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def install(tmp_path: Path) -> Callable[..., Distribution]:
    def installed(name: str, version: str = "1.0", *metadata: str) -> Distribution:
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        lines = ["Metadata-Version: 2.4", f"Name: {name}", f"Version: {version}", *metadata]
        (folder / "METADATA").write_text("\n".join(lines) + "\n")
        return next(one for one in distributions(path=[str(tmp_path)]) if one.name == name)

    return installed


@pytest.mark.parametrize(
    ("name", "version", "says"),
    [
        ("good", "1.0", None),
        ("good", "1.0+cpu", None),
        ("good", "2.0", "withdrawn by its authors: not this one"),
        ("partly", "1.0", None),
        ("withdrawn", "1.0", "withdrawn by its authors: leaks"),
        ("With_A.Name", "1.0", None),
        ("old", "1.0", "no such release"),
        ("unheard-of", "1.0", "no such package"),
    ],
)
def test_a_release_is_on_the_index_and_stands(
    address: str, install: Callable, name: str, version: str, says: str | None
) -> None:
    findings, unasked = script.release(install(name, version), f"{address}/simple")
    assert unasked == []
    assert len(findings) == (says is not None)
    assert says is None or says in findings[0]


@pytest.mark.parametrize(
    ("metadata", "fine"),
    [
        (["License-Expression: MIT"], True),
        (["License-Expression: (Apache-2.0 WITH LLVM-exception) AND MIT"], True),
        (["License-Expression: GPL-3.0-only OR BSD-2-Clause"], True),
        (["License-Expression: MIT AND GPL-3.0-only"], False),
        (["Classifier: License :: OSI Approved :: BSD License"], True),
        (["Classifier: License :: OSI Approved :: Mozilla Public License 2.0 (MPL 2.0)"], True),
        (["Classifier: License :: OSI Approved :: GNU Library or Lesser General Public License (LGPL)"], True),
        (["Classifier: License :: OSI Approved", "License: Apache 2.0 License"], True),
        (["Classifier: License :: OSI Approved :: GNU Affero General Public License v3"], False),
        (["License: Whatever its author likes"], False),
    ],
)
def test_licences_that_may_stand_beside_ours(install: Callable, metadata: list[str], fine: bool) -> None:
    findings, unasked = script.licence(install("one", "1.0", *metadata))
    assert unasked == []
    assert (findings == []) == fine


def test_known_vulnerabilities_fail_but_for_those_that_are_accepted(
    address: str, install: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    accepted = next(iter(script.ACCEPTED))
    monkeypatch.setattr(Service, "known", {"good": ["PYSEC-1", accepted], "old": [accepted]})
    packages = [install("good"), install("old"), install("partly")]
    assert script.advisories(packages, f"{address}/query") == (["good 1.0: PYSEC-1"], [])


def test_what_nobody_could_be_asked_is_said_and_strict_fails(
    install: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    install("good", "1.0", "License-Expression: MIT")
    monkeypatch.setattr(script, "distributions", lambda: distributions(path=[str(tmp_path)]))
    monkeypatch.setattr(script, "requirements", lambda: script.Audit([], []))
    nobody = ["--index", "http://127.0.0.1:9/simple", "--advisories", "http://127.0.0.1:9/query"]
    for strict, status in (([], 0), (["--strict"], 1)):
        record = tmp_path / "record.json"
        monkeypatch.setattr("sys.argv", ["audit", *nobody, *strict, "--out", str(record)])
        assert script.main() == status
        printed = capsys.readouterr().out
        assert "known vulnerabilities were NOT checked: no answer" in printed
        assert "good 1.0 was not looked up" in printed
        assert json.loads(record.read_text())["packages"] == {"good": "1.0"}
