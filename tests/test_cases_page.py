"""docs/cases.md names every row once, with the tests that are there."""

from __future__ import annotations

from itertools import chain

import pytest

from scripts import cases_page as script


def test_the_page_is_what_the_tests_names_say() -> None:
    assert script.PAGE.read_text(encoding="utf-8") == script.page(), "run: python -m scripts.cases_page"


def test_every_kind_has_a_test_and_every_case_a_kind() -> None:
    kinds = list(chain.from_iterable(script.KINDS.values()))
    assert len(kinds) == len(set(kinds))
    assert set(script.by_row()) == set(kinds)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("test_case_7_views", [7]),
        ("test_cases_38_and_40_rows", [38, 40]),
        ("test_case_78_and_90_a_long_run", [78, 90]),
        ("TestCase79PagerMachine", [79]),
        ("test_right_case_49", [49]),
        ("test_a_cased_word_of_3", []),
    ],
)
def test_rows_are_read_from_names(name: str, expected: list[int]) -> None:
    assert script.numbers(name) == expected
