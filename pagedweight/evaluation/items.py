"""What a model is evaluated on: token windows of a text, or prompts with gold answers, and which tokens count."""

from __future__ import annotations

import json
from ast import literal_eval
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pagedweight.calibration.text import Windows, read_documents, text_in, token_windows

Encode = Callable[[str], Sequence[int]]
CHARACTERS_PER_TOKEN = 8  # a token is seldom longer, and tokenizers take seconds for whole files
ANSWER_SHARE = 2  # an answer takes at most one half of the window, its prompt has the rest


class Items(NamedTuple):
    """windows: (n, T) tokens. scored: bool (n, T), tokens whose prediction counts. kind: "text" or "answers"."""

    windows: Windows
    scored: Tensor
    kind: str

    @property
    def beginnings(self) -> list[int]:
        """Tokens of each item before the first that is scored."""
        return self.scored.int().argmax(1).tolist()


class Size(NamedTuple):
    """tokens: of an item, at most. count: items of a task, at most. seed: of the choice among records."""

    tokens: int = 512
    count: int = 32
    seed: int = 0


def read_items(path: Path, encode: Encode, size: Size, end_token: int | None) -> Items:
    """The items of a file: text (plain, or .jsonl with a text field), or records with gold answers in the fields of
    GSM8K (question, answer), MATH (problem, solution) or LongBench (context, input, answers).

    ValueError when the file is none of these.
    """
    record = _first_record(path)
    if record is None or "text" in record:
        return text_items(path, encode, size, end_token)
    form = next((form for form in FORMS if form.fields <= record.keys()), None)
    if form is None:
        known = "; ".join(" and ".join(sorted(form.fields)) for form in FORMS)
        raise ValueError(f"{path} has records with {sorted(record)}; known are text, or {known}")
    return answer_items(_records(path), form, encode, size)


def text_items(path: Path, encode: Encode, size: Size, end_token: int | None) -> Items:
    """Windows of the text from its beginning; the second half of each counts, with the first as context."""
    longest = CHARACTERS_PER_TOKEN * size.tokens * size.count
    documents = [document[:longest] for document in read_documents(path)]
    windows = token_windows(documents, encode, length=size.tokens, count=size.count, end_token=end_token)
    scored = windows.mask & (torch.arange(size.tokens) >= size.tokens // 2)
    full = scored.any(1)
    if not full.any():
        raise ValueError(f"{path} has less than half a window of {size.tokens} tokens; give more text, or a --length")
    return Items(Windows(windows.tokens[full], windows.mask[full], windows.skipped), scored[full], "text")


class Form(NamedTuple):
    """A kind of record: its fields, and its prompt and gold answer."""

    fields: frozenset[str]
    prompt: Callable[[Mapping[str, Any]], str]
    answer: Callable[[Mapping[str, Any]], str]


def _gold(record: Mapping[str, Any]) -> str:
    """The first of LongBench's answers, which some files hold as the text of a list."""
    answers = record["answers"]
    return str((literal_eval(answers) if isinstance(answers, str) else answers)[0])


FORMS = (
    Form(frozenset({"context", "input", "answers"}), lambda r: f"{r['context']}\n\n{r['input']}\nAnswer:", _gold),
    Form(frozenset({"problem", "solution"}), lambda r: f"Problem: {r['problem']}\nSolution:", lambda r: r["solution"]),
    Form(frozenset({"question", "answer"}), lambda r: f"Question: {r['question']}\nAnswer:", lambda r: r["answer"]),
)


def answer_items(records: Sequence[Mapping[str, Any]], form: Form, encode: Encode, size: Size) -> Items:
    """A prompt and its gold answer each, of records drawn by the seed; the answer's tokens count.

    Of a prompt too long for the window the middle is left out, of an answer the end.
    """
    chosen = np.random.default_rng(size.seed).permutation(len(records))[: size.count]
    rows = [_pair(form.prompt(records[at]), form.answer(records[at]), encode, size.tokens) for at in sorted(chosen)]
    longest = max(len(prompt) + len(answer) for prompt, answer in rows)
    tokens, mask, scored = (
        torch.zeros(len(rows), longest, dtype=kind) for kind in (torch.int64, torch.bool, torch.bool)
    )
    for row, (prompt, answer) in enumerate(rows):
        length = len(prompt) + len(answer)
        tokens[row, :length] = torch.tensor(prompt + answer)
        mask[row, :length] = True
        scored[row, len(prompt) : length] = True
    return Items(Windows(tokens, mask, 0), scored, "answers")


def _pair(prompt: str, answer: str, encode: Encode, length: int) -> tuple[list[int], list[int]]:
    end = list(encode(f" {answer}"))[: max(1, length // ANSWER_SHARE)]
    start, room = list(encode(prompt)), length - len(end)
    if len(start) > room:
        start = start[: room // 2] + start[len(start) - (room - room // 2) :]
    return start, end


def _first_record(path: Path) -> Mapping[str, Any] | None:
    """None where the file is no .jsonl file."""
    if path.suffix != ".jsonl" or not path.is_file():
        return None
    return next(iter(_records(path, first=True)), None)


def _records(path: Path, *, first: bool = False) -> list[Mapping[str, Any]]:
    records = []
    for number, line in enumerate(text_in(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            records.append(json.loads(line))
        except ValueError as error:
            raise ValueError(f"{path} line {number} is not JSON ({error}); give one object per line") from error
        if not isinstance(records[-1], dict):
            raise ValueError(f"{path} line {number} is no object; give one object per line")
        if first:
            break
    return records
