"""The documentation's pictures of `inspect` and `report`; that of `top` is what `pagedweight top --picture` keeps.

    pagedweight demo --trace demo.jsonl
    pagedweight calibrate FOLDER --data TEXT          a copy of the model that ships
    python scripts/documentation_pictures.py FOLDER demo.jsonl

Needs chromium and chromedriver, for the page. Look at what comes out before it is committed.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from io import StringIO
from pathlib import Path

from rich.console import Console
from selenium import webdriver

from pagedweight.cli.heat import save_picture
from pagedweight.cli.inspect import show
from pagedweight.cli.inspect_facts import facts_of
from pagedweight.cli.inspect_picture import draw_sensitivity
from pagedweight.cli.report_page import page
from pagedweight.cli.report_run import read_run

DOCS = Path(__file__).parents[1] / "docs"
COLUMNS = 100
WINDOW = "--window-size=1280,1280"


def inspected(folder: Path) -> None:
    facts = facts_of(folder)
    console = Console(record=True, width=COLUMNS, force_terminal=True, color_system="truecolor", file=StringIO())
    show(facts._replace(folder=Path(folder.name)), console)
    save_picture(console, DOCS / "inspect.svg", "pagedweight inspect")
    figure = draw_sensitivity(facts)
    for suffix in (".png", ".svg"):
        figure.savefig(DOCS / f"sensitivity{suffix}")


def reported(trace: Path) -> None:
    """A photograph of the page, as a browser shows it."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", WINDOW):
        options.add_argument(flag)
    with tempfile.TemporaryDirectory() as folder, trace.open(encoding="utf-8") as lines:
        html = Path(folder) / "report.html"
        html.write_text(page(read_run(lines), trace.name), encoding="utf-8")
        browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
        try:
            browser.get(html.as_uri())
            browser.save_screenshot(str(DOCS / "report.png"))
        finally:
            browser.quit()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="calibrated folder")
    parser.add_argument("trace", type=Path)
    options = parser.parse_args()
    inspected(options.folder)
    reported(options.trace)


if __name__ == "__main__":
    main()
