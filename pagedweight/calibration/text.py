"""Calibration text: documents from files, and fixed windows of tokens with a mask over the last one's padding."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from pagedweight.calibration.capture import Batch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DOCUMENT_END = "<|endoftext|>"  # a line of its own between documents of a plain text file
FEWEST_TOKENS = 32


class Windows(NamedTuple):
    """tokens: int64 (n, T). mask: bool (n, T), False for padding. skipped: documents without a token."""

    tokens: torch.Tensor
    mask: torch.Tensor
    skipped: int

    def batches(self, rows: int, device: torch.device | str = "cpu") -> Iterator[Batch]:
        """The windows in order, `rows` at a time; the last batch may be smaller."""
        for tokens, mask in zip(self.tokens.split(rows), self.mask.split(rows), strict=True):
            yield Batch(tokens.to(device), mask.to(device))

    def first(self, count: int) -> Windows:
        return self._replace(tokens=self.tokens[:count], mask=self.mask[:count])


def read_documents(path: str | Path) -> list[str]:
    """Documents of a .jsonl file (its records' "text") or of a text file divided by lines of <|endoftext|>.

    ValueError, before any model is touched, when the file is missing, empty, or not what its name says.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path} is not a file; give a .jsonl file with a text field, or a plain text file")
    content = text_in(path)
    if path.suffix == ".jsonl":
        lines = enumerate(content.splitlines(), 1)
        documents = [_text_of(line, path, number) for number, line in lines if line.strip()]
    else:
        documents = content.split(f"\n{DOCUMENT_END}\n")
    if not any(document.strip() for document in documents):
        raise ValueError(f"{path} holds no text; give calibration text of at least {FEWEST_TOKENS} tokens")
    return documents


def text_in(path: Path) -> str:
    """A file's text; ValueError where it is in no UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no UTF-8 text at byte {error.start}; give text, or convert it") from error


def _text_of(line: str, path: Path, number: int) -> str:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{path} line {number} is not JSON ({error}); give one object with a text field") from error
    if not isinstance(record, dict) or not isinstance(record.get("text"), str):
        raise ValueError(f"{path} line {number} has no text; give one object with a text field per line")
    return record["text"]


def token_windows(
    documents: Iterable[str],
    encode: Callable[[str], Sequence[int]],
    *,
    length: int = 512,
    count: int | None = None,
    end_token: int | None = None,
) -> Windows:
    """The documents' tokens end to end, cut every `length` tokens; the last window is padded with masked zeros.

    encode: token ids of a text, without special tokens. count: stop after that many windows. end_token: put after
    each document. ValueError when there are fewer than 32 tokens in all.
    """
    if length < 2 or (count is not None and count < 1):
        raise ValueError(f"windows of {length} tokens, {count} of them; give at least one window of at least 2 tokens")
    wanted = None if count is None else length * count
    ids: list[int] = []
    skipped = 0
    for document in documents:
        encoded = list(encode(document))
        skipped += not encoded
        ids += encoded + ([end_token] if encoded and end_token is not None else [])
        if wanted is not None and len(ids) >= wanted:
            break
    if len(ids) < FEWEST_TOKENS:
        raise ValueError(
            f"the calibration text has {len(ids)} tokens ({skipped} documents were empty); give {FEWEST_TOKENS} or more"
        )
    ids = ids[:wanted]
    rows = -(-len(ids) // length)
    tokens = torch.zeros(rows * length, dtype=torch.int64)
    tokens[: len(ids)] = torch.tensor(ids)
    mask = torch.arange(rows * length) < len(ids)
    return Windows(tokens.view(rows, length), mask.view(rows, length), skipped)


Text = str | Path | Sequence[Path] | Sequence[str] | Windows


def windows_of(
    text: Text, tokenizer_of: Callable[[], PreTrainedTokenizerBase], *, length: int = 512, count: int | None = None
) -> Windows:
    """Windows of calibration text, at most `count`.

    text: a text or .jsonl file; several of them as Paths, which give a window each in turn; documents; or windows.
    tokenizer_of: called once the files have been read. ValueError when the text will not do.
    """
    if isinstance(text, Windows):
        return text if count is None else text.first(count)
    if isinstance(text, str | Path):
        text = [Path(text)]
    named = [one for one in text if isinstance(one, str) and os.path.isfile(one)]  # a Path of a long text would raise
    if named:
        raise ValueError(f"{named[0]} among the texts is the name of a file; give Path({named[0]!r}) to have it read")
    files = [one for one in text if isinstance(one, Path)]
    groups = [read_documents(file) for file in files] if files else [list(text)]
    tokenizer = tokenizer_of()

    def encode(document: str) -> Sequence[int]:
        return tokenizer(document, add_special_tokens=False)["input_ids"]

    cuts = [token_windows(one, encode, length=length, count=count, end_token=tokenizer.eos_token_id) for one in groups]
    return in_turn(cuts, count)


def in_turn(cuts: Sequence[Windows], count: int | None) -> Windows:
    """The first window of each text, then the second of each, and so on."""
    if len(cuts) == 1:
        return cuts[0]
    order = sorted((row, text) for text, cut in enumerate(cuts) for row in range(len(cut.tokens)))[:count]
    return Windows(
        torch.stack([cuts[text].tokens[row] for row, text in order]),
        torch.stack([cuts[text].mask[row] for row, text in order]),
        sum(cut.skipped for cut in cuts),
    )
