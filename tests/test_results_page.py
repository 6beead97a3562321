"""docs/results.md is what the script makes of bench/results, and each of its tables says by which command."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("transformers", reason="needs the hf extra")

from scripts import results_page as script


@pytest.fixture(scope="module")
def page() -> str:
    return script.page()


def test_the_page_is_up_to_date(page: str) -> None:
    assert script.PAGE.read_text(encoding="utf-8") == page, "run: python -m scripts.results_page"


def test_what_the_summary_is_made_of_is_shown_below_it(page: str) -> None:
    for record in script.records_of(
        "policies-*.json", script.SPEEDS, script.COMPILED, script.MOVED, script.EVALUATIONS
    ):
        assert f"\n`{record['command']}`, " in page


def test_a_limit_that_is_passed_is_explained(page: str) -> None:
    sections = re.split(r"^##+ ", page, flags=re.MULTILINE)
    passed = [one for one in sections if re.search(r"beside the limit.* (?:- *, )?[1-9]\.\d\d", one)]
    assert passed
    assert all("its shared one is in bf16" in one for one in passed)


def test_nothing_is_a_multiple_of_no_divergence(page: str) -> None:
    """At 8 bits short rows have a code for every weight: what is left there is rounding."""
    multiples = re.findall(r"\| (-?[\d.]+) \(-?[\d.]+ to -?[\d.]+\)", page)
    assert len(multiples) > 100
    assert all(0 < float(multiple) < 1000 for multiple in multiples)


def test_every_section_names_the_command_of_its_figures(page: str) -> None:
    sections = re.split(r"^## ", page, flags=re.MULTILINE)[1:]
    assert sections.pop().startswith("Elsewhere\n")
    assert sections.pop(0).startswith("Summary\n"), "its figures are those of the sections"
    assert len(sections) > 1
    for section in sections:
        assert "| --- |" in section, section
        assert re.search(r"^`(python|pagedweight) .+`, ", section, re.MULTILINE), section


def test_a_bar_is_met_from_its_figure_on_and_missed_below() -> None:
    from bench.e2e.throughput_peers import GROUPED
    from scripts.results_gains import gains

    def cells(saved: float, times: float) -> str:
        bar = {"batch": 1, "width": 3, "codebooks": "fast", "against": GROUPED}
        bar |= {"memory_saved": saved, "times_tokens_per_second": times}
        dense = {"experts": GROUPED, "batch": 1, "peak_reserved_bytes": 10**10}
        return "\n".join(gains([{"layers": 24, "bars": [bar], "dense": [dense]}]))

    assert "| memory saved | 69.00 %, met | - | - | - |" in cells(0.69, 1.0)
    assert "| memory saved | 68.90 %, missed | - | - | - |" in cells(0.689, 1.0)
    assert "one graph | 1.94, met |" in cells(0.0, 1.94)
    assert "one graph | 1.94, missed |" in cells(0.0, 1.939)


def test_nothing_is_judged_where_the_compiler_served_one_of_the_two_alone(page: str) -> None:
    unlike = re.search(r"^\| ours compiled, bf16 not, one graph \|(.*)$", page, re.MULTILINE)[1]
    assert re.search(r"\d\.\d\d", unlike)
    assert "met" not in unlike
    assert "missed" not in unlike
