"""The documentation's pictures of `inspect` and `report`, and a photograph of docs/top.svg (bench.serving.run):

    pagedweight demo --trace demo.jsonl
    pagedweight calibrate FOLDER --data TEXT          a copy of the model that ships
    python scripts/documentation_pictures.py FOLDER demo.jsonl

Needs chromium and chromedriver, for photographs. Look at what comes out before it is committed.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path

from rich.console import Console
from selenium import webdriver
from selenium.webdriver.support.wait import WebDriverWait

from pagedweight.cli.heat import save_picture
from pagedweight.cli.inspect import show
from pagedweight.cli.inspect_facts import facts_of
from pagedweight.cli.inspect_picture import draw_sensitivity
from pagedweight.cli.report_page import page
from pagedweight.cli.report_run import read_run

DOCS = Path(__file__).parents[1] / "docs"
COLUMNS = 100
DRAWN = "return document.querySelectorAll('#run .barlayer .point').length > 0"  # the last panel's
DRAWN_SECONDS = 60
WINDOW = "--window-size=1280,1420"


def inspected(folder: Path) -> None:
    facts = facts_of(folder)
    console = Console(record=True, width=COLUMNS, force_terminal=True, color_system="truecolor", file=StringIO())
    show(facts._replace(folder=Path(folder.name)), console)
    save_picture(console, DOCS / "inspect.svg", "pagedweight inspect")
    figure = draw_sensitivity(facts)
    for suffix in (".png", ".svg"):
        figure.savefig(DOCS / f"sensitivity{suffix}")


@contextmanager
def browser(scheme: str) -> Iterator[webdriver.Chrome]:
    """Chromium as a reader has it who prefers light or dark."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", WINDOW):
        options.add_argument(flag)
    found = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        preferred = [{"name": "prefers-color-scheme", "value": scheme}]
        found.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": preferred})
        yield found
    finally:
        found.quit()


def reported(trace: Path) -> None:
    """Photographs of the page, on white and on black."""
    with tempfile.TemporaryDirectory() as folder, trace.open(encoding="utf-8") as lines:
        html = Path(folder) / "report.html"
        html.write_text(page(read_run(lines), trace.name), encoding="utf-8")
        for scheme, name in (("light", "report.png"), ("dark", "report-dark.png")):
            with browser(scheme) as seen:
                seen.get(html.as_uri())
                WebDriverWait(seen, DRAWN_SECONDS).until(lambda page: page.execute_script(DRAWN))
                seen.save_screenshot(str(DOCS / name))


def photographed(name: str) -> None:
    """A terminal's picture as .png beside its .svg, at twice its size."""
    picture = DOCS / f"{name}.svg"
    with browser("light") as seen:
        seen.get(picture.as_uri())
        wide, high = map(
            float, seen.execute_script("return document.documentElement.getAttribute('viewBox')").split()[2:]
        )
        size = {"width": round(wide), "height": round(high), "deviceScaleFactor": 2, "mobile": False}
        seen.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        seen.save_screenshot(str(DOCS / f"{name}.png"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="calibrated folder")
    parser.add_argument("trace", type=Path)
    options = parser.parse_args()
    inspected(options.folder)
    reported(options.trace)
    for name in ("inspect", "top"):
        photographed(name)


if __name__ == "__main__":
    main()
