"""What the commands share: sizes, extras, and one sentence on stderr before leaving with exit code 2."""

from __future__ import annotations

import importlib.util
import re

import typer

EXTRA_MODULES = {
    "hf": ("transformers",),
    "plots": ("matplotlib", "plotly"),
    "serve": ("transformers", "fastapi", "uvicorn", "openai", "prometheus_client"),
    "vllm": ("vllm",),
    "eval": ("lm_eval",),
}
UNIT_BYTES = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def fail(message: str) -> typer.Exit:
    """Print one sentence on stderr; raise the result to leave with exit code 2."""
    typer.echo(f"pagedweight: {message}", err=True)
    return typer.Exit(2)


def parse_bytes(text: str) -> int:
    """Bytes of a size such as 9437184, 9MiB or 1.5GB; ValueError when it is not one."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if not match or match[2].upper() not in UNIT_BYTES:
        raise ValueError(f"{text!r} is not a size; write bytes, or a number with KiB, MiB, GiB, KB, MB or GB")
    return int(float(match[1]) * UNIT_BYTES[match[2].upper()])


def size_option(option: str, text: str) -> int:
    """Bytes of an option's size; leaves with exit code 2 when it is none."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise fail(f"{option}: {error}") from error


def require_extras(*extras: str) -> None:
    """Leave with exit code 2 and the install command when an extra's packages are missing."""
    missing = [name for extra in extras for name in EXTRA_MODULES[extra] if importlib.util.find_spec(name) is None]
    if missing:
        raise fail(f"{' and '.join(missing)} not installed; run: pip install 'pagedweight[{','.join(extras)}]'")
