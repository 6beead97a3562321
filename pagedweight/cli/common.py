"""What the commands share: sizes, extras, and one sentence on stderr before leaving with exit code 2."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

EXTRA_MODULES = {
    "hf": ("transformers",),
    "plots": ("matplotlib", "plotly"),
    "serve": ("transformers", "fastapi", "uvicorn", "openai", "prometheus_client"),
    "vllm": ("vllm",),
    "eval": ("lm_eval",),
}
UsageError = typer.BadParameter.__base__  # typer has it from click, or from a click of its own
TRACE_FAULTS = (OSError, ValueError, KeyError, TypeError, IndexError)  # of a file that is no trace, or half of one
UNIT_BYTES = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


class OneSentence(TyperGroup):
    """Commands whose usage errors are one sentence as well, where typer would draw a box."""

    def main(self, *args: Any, standalone_mode: bool = True, **kwargs: Any) -> NoReturn:
        try:
            code = super().main(*args, standalone_mode=False, **kwargs)
        except UsageError as error:
            help_of = error.ctx.command_path if error.ctx else "pagedweight"
            message = " ".join(error.format_message().split()).rstrip(".?")
            code = fail(f"{message}; see {help_of} --help").exit_code
        sys.exit(code)


def fail(message: str) -> typer.Exit:
    """Print one sentence on stderr; raise the result to leave with exit code 2."""
    typer.echo(f"pagedweight: {message}", err=True)
    return typer.Exit(2)


def trace_fault(error: Exception) -> str:
    """Why a trace could not be read, of TRACE_FAULTS."""
    if isinstance(error, OSError):
        return error.strerror
    if isinstance(error, ValueError):
        return str(error)
    return f"a line is damaged ({type(error).__name__}: {error}); give a trace, or what is whole of it"


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


def device_option(text: str | None) -> str:
    """Where to work: as asked, or the GPU if there is one; leaves with exit code 2 where torch has no such device."""
    import torch

    if text is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(text)
    except RuntimeError as error:
        raise fail(f"--device {text}: torch knows no such device; give cpu, cuda or cuda:1") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise fail(f"--device {text}: torch sees {torch.cuda.device_count()} GPUs here; see pagedweight doctor")
    return text


def model_option(option: str, text: str | None) -> str | None:
    """A dense model's folder or its name on the Hub, None for none; leaves with exit code 2 when it can be neither."""
    from pagedweight.saving_hub import is_hub_name

    if text is not None and not Path(text).is_dir() and not is_hub_name(text):
        raise fail(f"{option} {text}: there is no such folder; give a model's folder or its name on the Hub")
    return text


def missing_of(extra: str) -> list[str]:
    """The modules of an extra that are not installed."""
    return [name for name in EXTRA_MODULES[extra] if importlib.util.find_spec(name) is None]


def require_extras(*extras: str) -> None:
    """Leave with exit code 2 and the install command when an extra's packages are missing."""
    missing = [name for extra in extras for name in missing_of(extra)]
    if missing:
        raise fail(f"{' and '.join(missing)} not installed; run: pip install 'pagedweight[{','.join(extras)}]'")
