"""For the documentation's site: what our docstrings say of arguments and fields, line by line, becomes a list."""

from __future__ import annotations

import re
from typing import Any

import griffe

FIELD = re.compile(r"^((?:[a-z]\w*)(?:, [a-z]\w*)*): ", re.MULTILINE)
RAISES = re.compile(r"^(?=[A-Z]\w*Error\b|Raises )", re.MULTILINE)


def as_list(text: str) -> str:
    """Markdown of a docstring: its first paragraph, its fields as a list, what is raised as a paragraph."""
    first, separator, rest = text.partition("\n\n")
    return first + separator + RAISES.sub("\n", FIELD.sub(r"\n- `\1`: ", rest))


class Fields(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **rest: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_list(obj.docstring.value)
