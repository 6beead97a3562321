"""Places of pagedweight/runtime that an operator of cosmic-ray fits, and the source with one of them changed."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from cosmic_ray.ast import Visitor, ast_nodes, get_ast
from cosmic_ray.operators.provider import OperatorProvider

FOLDER = "pagedweight/runtime"
# They want a name to be told, which no draw has.
NOT_DRAWN = {"VariableReplacer", "VariableInserter"}
OPERATORS = {name: OperatorProvider()[name]() for name in OperatorProvider() if name not in NOT_DRAWN}


class Mutant(NamedTuple):
    """occurrence: of the operator in the file, counted as cosmic-ray does. first_line: of the statement."""

    file: str
    operator: str
    occurrence: int
    first_line: int
    line: int
    before: str
    after: str

    @classmethod
    def of(cls, record: dict[str, Any]) -> Mutant:
        return cls(**{name: record[name] for name in cls._fields})

    @property
    def key(self) -> tuple[str, str, int]:
        return self.file, self.operator, self.occurrence

    def source(self, root: Path) -> str:
        return _changed((root / self.file).read_text(encoding="utf-8"), self.operator, self.occurrence)


class _Change(Visitor):
    def __init__(self, operator: str, occurrence: int) -> None:
        self.operator, self.left = OPERATORS[operator], occurrence

    def visit(self, node: Any) -> Any:
        for index, _ in enumerate(self.operator.mutation_positions(node)):
            if self.left == 0:
                node = self.operator.mutate(node, index)
            self.left -= 1
        return node


def _changed(source: str, operator: str, occurrence: int) -> str:
    return _Change(operator, occurrence).walk(get_ast(source)).get_code()


def draw(root: Path, count: int, seed: int) -> list[Mutant]:
    """Places without repetition, then one of each place's operators: `a + b` is one place, not eleven."""
    choose = random.Random(seed)
    places = [place for path in sorted((root / FOLDER).glob("*.py")) for place in _places(root, path)]
    return [_mutant(root, *choose.choice(place)) for place in choose.sample(places, count)]


def find_again(root: Path, records: list[dict[str, Any]]) -> tuple[list[Mutant], list[dict[str, Any]]]:
    """The mutants of a record in the present source, and those whose text is not there any more."""
    found, gone, taken = [], [], set()
    for record in records:
        texts = record["before"], record["after"]
        alike = [m for m in _like(root, record) if (m.before, m.after) == texts and m.key not in taken]
        if alike:
            found.append(min(alike, key=lambda mutant: abs(mutant.line - record["line"])))
            taken.add(found[-1].key)
        else:
            gone.append(record)
    return found, gone


def _like(root: Path, record: dict[str, Any]) -> Iterator[Mutant]:
    """What the record's operator makes of the lines that read as its line did."""
    path = root / record["file"]
    if not path.exists():
        return
    lines, wanted = path.read_text(encoding="utf-8").splitlines(), record["before"].splitlines()
    for option in (option for place in _file_places(root, path) for option in place):
        if option[1] == record["operator"] and lines[option[3].start_pos[0] - 1] in wanted:
            yield _mutant(root, *option)


@cache
def _file_places(root: Path, path: Path) -> list[list[tuple[str, str, int, Any]]]:
    return list(_places(root, path))


def _places(root: Path, path: Path) -> Iterator[list[tuple[str, str, int, Any]]]:
    """For each place its (file, operator, occurrence, node)."""
    places, seen = defaultdict(list), dict.fromkeys(OPERATORS, 0)
    for node in ast_nodes(get_ast(path.read_text(encoding="utf-8"))):
        for name, operator in OPERATORS.items():
            for start, _ in operator.mutation_positions(node):
                if not _in_annotation(node):
                    option = (path.relative_to(root).as_posix(), name, seen[name], node)
                    places[start, name.partition("_")[0]].append(option)
                seen[name] += 1
    yield from places.values()


def _in_annotation(node: Any) -> bool:
    """Whether the node is in an annotation, which `from __future__ import annotations` leaves as text."""
    while (above := node.parent) is not None:
        if above.type == "annassign" and above.children[1] is node:
            return True
        if above.type in ("param", "funcdef") and above.annotation is node:
            return True
        if above.type == "tfpdef" and above.children[-1] is node:
            return True
        node = above
    return False


def _mutant(root: Path, file: str, operator: str, occurrence: int, node: Any) -> Mutant:
    source = (root / file).read_text(encoding="utf-8")
    before, after = _difference(source, _changed(source, operator, occurrence))
    return Mutant(file, operator, occurrence, _statement(node).start_pos[0], node.end_pos[0], before, after)


def _statement(node: Any) -> Any:
    while node.parent is not None and node.parent.type not in ("suite", "file_input"):
        node = node.parent
    return node


def _difference(source: str, changed: str) -> tuple[str, str]:
    """The lines that differ, from the first to the last, in both."""
    old, new = source.splitlines(), changed.splitlines()
    first = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    last = next((i for i, (a, b) in enumerate(zip(old[::-1], new[::-1], strict=False)) if a != b), 0)
    return "\n".join(old[first : len(old) - last]), "\n".join(new[first : len(new) - last])
