"""Items of an evaluation: what counts, what is cut, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedweight.evaluation.items import Items, Size, read_items


def encode(text: str) -> list[int]:
    """A token for each character."""
    return [ord(character) % 251 for character in text]


def records(path: Path, *found: dict) -> Path:
    path.write_text("\n".join(json.dumps(one) for one in found), encoding="utf-8")
    return path


def scored_text(items: Items, row: int) -> str:
    return "".join(map(chr, items.windows.tokens[row][items.scored[row]].tolist()))


@pytest.mark.parametrize(
    ("record", "answer"),
    [
        ({"question": "one and one?", "answer": "two"}, "two"),
        ({"problem": "one and one?", "solution": "two", "answer": "2"}, "two"),
        ({"context": "one and one", "input": "is?", "answers": ["two", "2"]}, "two"),
        ({"context": "one and one", "input": "is?", "answers": "['two', '2']"}, "two"),
    ],
)
def test_the_answers_tokens_count_and_the_prompts_do_not(tmp_path: Path, record: dict, answer: str) -> None:
    items = read_items(records(tmp_path / "one.jsonl", record), encode, Size(64), None)
    assert scored_text(items, 0) == f" {answer}"
    whole = "".join(map(chr, items.windows.tokens[0][items.windows.mask[0]].tolist()))
    assert next(iter(record.values())) in whole
    assert whole.endswith(f" {answer}")
    assert items.beginnings == [len(whole) - len(answer) - 1]


def test_of_a_prompt_too_long_the_middle_is_left_out(tmp_path: Path) -> None:
    record = {"context": "begin" + "x" * 500, "input": "the question", "answers": ["yes"]}
    items = read_items(records(tmp_path / "one.jsonl", record), encode, Size(40), None)
    whole = "".join(map(chr, items.windows.tokens[0].tolist()))
    assert len(whole) == 40
    assert whole.startswith("begin")
    assert whole.endswith("question\nAnswer: yes")


def test_the_second_half_of_a_texts_windows_counts(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("a" * 70, encoding="utf-8")
    items = read_items(path, encode, Size(32, 8), None)
    assert items.kind == "text"
    assert items.scored.sum(1).tolist() == [16, 16]  # the last 6 tokens are no half window
    assert items.beginnings == [16, 16]


def test_a_text_of_less_than_half_a_window_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("a" * 40, encoding="utf-8")
    with pytest.raises(ValueError, match=r"less than half a window of 128 tokens; give more text, or a --length"):
        read_items(path, encode, Size(128, 8), None)


@given(st.lists(st.tuples(st.text("abc ", min_size=1), st.text("xyz", min_size=1)), min_size=1, max_size=6))
def test_every_item_has_a_prompt_and_something_to_score(pairs: list[tuple[str, str]]) -> None:
    from pagedweight.evaluation.items import FORMS, answer_items

    form = next(form for form in FORMS if "question" in form.fields)
    items = answer_items([{"question": q, "answer": a} for q, a in pairs], form, encode, Size(24, 4))
    assert len(items.scored) == min(4, len(pairs))
    assert (items.scored.sum(1) > 0).all()
    assert all(beginning > 0 for beginning in items.beginnings)
    assert not (items.scored & ~items.windows.mask).any()


def test_the_seed_chooses_the_records(tmp_path: Path) -> None:
    path = records(tmp_path / "many.jsonl", *({"question": "?", "answer": f"{i}"} for i in range(50)))
    same, again, other = (read_items(path, encode, Size(32, 4, seed), None).windows.tokens for seed in (0, 0, 1))
    assert same.equal(again)
    assert not (same.shape == other.shape and same.equal(other))


@pytest.mark.parametrize(
    ("content", "message"),
    [('{"title": "x"}', "known are text"), ("[1]", "is no object"), ("{", "is not JSON")],
)
def test_files_of_another_kind_are_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "other.jsonl"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        read_items(path, encode, Size(), None)
