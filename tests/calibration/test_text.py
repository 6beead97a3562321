"""Calibration text: cut end to end, padded once, refused in a sentence when it is not there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pagedweight.calibration.text import read_documents, text_in, token_windows, windows_of


def encode(text: str) -> list[int]:
    return [ord(character) for character in text]


@given(st.lists(st.text(min_size=0, max_size=40), min_size=1, max_size=6), st.integers(2, 50))
def test_windows_hold_every_token_in_order(documents: list[str], length: int) -> None:
    expected = [i for document in documents if document for i in (*encode(document), 7)]
    if len(expected) < 32:
        with pytest.raises(ValueError, match=f"has {len(expected)} tokens"):
            token_windows(documents, encode, length=length, end_token=7)
        return
    windows = token_windows(documents, encode, length=length, end_token=7)
    assert windows.tokens[windows.mask].tolist() == expected
    assert windows.skipped == documents.count("")
    assert windows.mask[:-1].all()
    assert windows.mask[-1, 0]
    rows = [batch.tokens for batch in windows.batches(2)]
    assert torch.equal(torch.cat(rows), windows.tokens)


def test_text_in_another_encoding_is_refused_with_its_first_byte(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes("café".encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin\.txt is no UTF-8 text at byte 3; give text, or convert it"):
        text_in(tmp_path / "latin.txt")


def test_a_count_of_windows_is_kept() -> None:
    windows = token_windows(["x" * 1000] * 3, encode, length=64, count=5)
    assert windows.tokens.shape == (5, 64)
    assert windows.mask.all()


def test_files_are_read_by_their_kind(tmp_path) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": t}) for t in ("one", "two\nthree")) + "\n")
    (tmp_path / "a.txt").write_text("one\n<|endoftext|>\ntwo\nthree")
    assert read_documents(tmp_path / "a.jsonl") == read_documents(tmp_path / "a.txt") == ["one", "two\nthree"]


def test_a_name_of_a_file_is_no_document(tmp_path: Path) -> None:
    """Calibrating on the names of files would go on in silence."""
    (tmp_path / "a.txt").write_text("words " * 40)
    with pytest.raises(ValueError, match=r"a\.txt among the texts is the name of a file; give Path\("):
        windows_of([str(tmp_path / "a.txt"), "word " * 400], lambda: pytest.fail("read"))


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("empty.txt", "", "holds no text"),
        ("blank.jsonl", "\n\n", "holds no text"),
        ("broken.jsonl", '{"text": "a"}\n{', "line 2 is not JSON"),
        ("other.jsonl", '{"content": "a"}', "line 1 has no text"),
        ("missing.txt", None, "is not a file"),
    ],
)
def test_case_29_bad_text_is_refused_at_the_door(tmp_path, name: str, content: str | None, sentence: str) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=sentence):
        read_documents(tmp_path / name)


def test_case_29_short_samples() -> None:
    """Three-token lines are joined; fewer samples than a batch make one smaller batch."""
    windows = token_windows(["abc"] * 20 + [""], encode, length=40)
    assert (windows.tokens.shape, int(windows.mask.sum()), windows.skipped) == ((2, 40), 60, 1)
    assert [len(batch.tokens) for batch in windows.batches(8)] == [2]
    with pytest.raises(ValueError, match=r"has 30 tokens \(0 documents were empty\)"):
        token_windows(["abc"] * 10, encode)
