"""For mkdocs: links of the pages that leave docs/ lead to copies of those files in the site, so that all links work.

Pages read on a code host and in the site alike; here ../README.md becomes repository/README.md, which is added.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
OUTSIDE = "repository"
LINK = re.compile(r"(\]\()([^)#\s:]+)((?:#[^)\s]*)?\))")


def source(uri: str) -> Path:
    """The file of the repository that a site's uri stands for, relative to ROOT."""
    inside, outside = Path("docs") / uri, Path(uri)
    return outside.relative_to(OUTSIDE) if outside.parts[0] == OUTSIDE else inside


def uri_of(path: Path) -> str:
    """The site's uri of a file of the repository."""
    return path.relative_to("docs").as_posix() if path.parts[0] == "docs" else (Path(OUTSIDE) / path).as_posix()


def targets(markdown: str, page: Path) -> set[Path]:
    """Files of the repository that a page links to, relative to ROOT."""
    found = (Path(os.path.normpath(page.parent / match[2])) for match in LINK.finditer(markdown))
    return {path for path in found if (ROOT / path).is_file()}


def on_files(files: Any, config: Any) -> Any:
    """Add what is linked to outside docs/, and what that links to."""
    waiting = [source(file.src_uri) for file in files if file.src_uri.endswith(".md")]
    known = set(waiting)
    while waiting:
        page = waiting.pop()
        for path in targets((ROOT / page).read_text(encoding="utf-8"), page) - known:
            known.add(path)
            if path.parts[0] != "docs":
                files.append(File.generated(config, uri_of(path), abs_src_path=str(ROOT / path)))
            if path.suffix == ".md":
                waiting.append(path)
    return files


def on_page_markdown(markdown: str, page: Any, **rest: Any) -> str:
    """Rewrite every relative link to where its target is in the site."""
    own = source(page.file.src_uri)

    def moved(match: re.Match) -> str:
        target = Path(os.path.normpath(own.parent / match[2]))
        if not (ROOT / target).exists():
            return match[0]
        if (ROOT / target).is_dir():
            return f"{match[1]}{os.path.relpath(uri_of(own), uri_of(own))}{match[3]}"
        return f"{match[1]}{os.path.relpath(uri_of(target), Path(page.file.src_uri).parent)}{match[3]}"

    return LINK.sub(moved, markdown)
