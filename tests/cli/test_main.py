"""The command line, what importing it costs, and what the package's metadata promises."""

from __future__ import annotations

import importlib
import multiprocessing
import re
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import pagedweight
from pagedweight.cli.common import UNIT_BYTES, parse_bytes
from pagedweight.cli.main import app

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
RUNNER = CliRunner()


def python(code: str) -> subprocess.CompletedProcess:
    """Run code in a new interpreter, where nothing is imported yet."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120)


def test_version() -> None:
    result = RUNNER.invoke(app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"pagedweight {pagedweight.__version__}\n")
    assert re.fullmatch(r"\d+\.\d+\.\d+", pagedweight.__version__)


def test_the_package_and_its_metadata_give_the_same_version() -> None:
    assert PROJECT["version"] == pagedweight.__version__


def test_help_names_the_commands() -> None:
    result = RUNNER.invoke(app, ["--help"])
    assert result.exit_code == 0
    assert "demo" in result.output


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["demo", "--budget", "many"], "many"),  # not a size
        (["demo", "--budget", "12 parsecs"], "parsecs"),  # a unit nobody knows
        (["demo", "--tokens", "3"], "tokens"),  # below the range
        (["demo", "--output", __file__], "--output"),  # a file, where a folder is wanted
        (["no-such-command"], "no-such-command"),
    ],
)
def test_bad_input_leaves_with_code_2_and_says_what(arguments: list[str], word: str) -> None:
    result = RUNNER.invoke(app, arguments)
    assert result.exit_code == 2
    assert word in result.output
    assert "Traceback" not in result.output


@given(st.integers(0, 10**6), st.sampled_from(sorted(UNIT_BYTES)), st.sampled_from(["", " "]), st.booleans())
def test_sizes_are_read_in_every_unit(count: int, unit: str, space: str, lower: bool) -> None:
    text = f"{count}{space}{unit.lower() if lower else unit}"
    assert parse_bytes(text) == count * UNIT_BYTES[unit]


@given(st.text(max_size=12))
def test_a_size_is_read_or_refused_in_one_sentence(text: str) -> None:
    if re.fullmatch(r"\s*\d+(\.\d+)?\s*(?:[kmg]i?b|b)?\s*", text, re.IGNORECASE):
        assert parse_bytes(text) >= 0
    else:
        with pytest.raises(ValueError, match="write bytes"):
            parse_bytes(text)


@pytest.mark.parametrize(("module", "extra"), [("transformers", "hf"), ("matplotlib", "plots")])
def test_a_missing_extra_is_one_sentence(module: str, extra: str) -> None:
    done = python(f"import sys; sys.modules[{module!r}] = None; from pagedweight.cli.main import main; main(['demo'])")
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1
    assert module in done.stderr
    assert extra in done.stderr


def test_importing_the_package_loads_no_heavy_module() -> None:
    heavy = {"torch", "triton", "transformers", "matplotlib", "scipy", "numpy"}
    done = python(f"import sys, pagedweight, pagedweight.cli; print(sorted({heavy} & set(sys.modules)))")
    assert done.stdout == "[]\n", done.stderr


def test_case_95_importing_again_in_any_way_is_harmless() -> None:
    """Reloading, loading the entry point twice and a spawned worker all find the same package."""
    assert importlib.reload(pagedweight).__version__ == pagedweight.__version__
    script = EntryPoint("pagedweight", PROJECT["scripts"]["pagedweight"], "console_scripts")
    assert script.load() is script.load()
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(parse_bytes, ("2KiB",)) == 2048


def test_case_122_only_lower_bounds() -> None:
    """An exact pin or an upper bound would stop a user whose torch, Triton or Python is newer."""
    wanted = [*PROJECT["dependencies"], *(r for extra in PROJECT["optional-dependencies"].values() for r in extra)]
    for requirement in [*wanted, f"python{PROJECT['requires-python']}"]:
        bound = requirement.split(";")[0]
        assert not re.search(r"==|<|~=|===|!=", bound), f"{requirement} has more than a lower bound"


def test_case_118_without_triton_everything_but_the_gpu_kernels_works() -> None:
    """Where Triton has no build, import, --help, quantizing, patching and a forward on the CPU still work."""
    pytest.importorskip("transformers")
    done = python(
        "import sys; sys.modules['triton'] = None\n"
        "import torch, pagedweight\n"
        "from typer.testing import CliRunner\n"
        "from pagedweight.cli.main import app\n"
        "from tests.hf_models import mixtral_m8\n"
        "assert CliRunner().invoke(app, ['--help']).exit_code == 0\n"
        "model = pagedweight.patch(mixtral_m8(num_hidden_layers=1))\n"
        "print(torch.isfinite(model(torch.arange(6)[None]).logits).all().item())\n"
    )
    assert done.stdout == "True\n", done.stderr


def test_importing_takes_little_beyond_torch_and_triton() -> None:
    """It loads neither, so all that it takes is beyond them. CPU seconds: other processes share the machine."""
    code = "import time; began = time.process_time(); import pagedweight; print(time.process_time() - began)"
    assert min(float(python(code).stdout) for _ in range(3)) <= 0.15


def test_help_says_the_exit_codes() -> None:
    said = " ".join(RUNNER.invoke(app, ["--help"]).output.split())
    for code in ("0 done", "1 done, and the answer is no", "2 bad input", "130 interrupted"):
        assert code in said.replace("│ ", "")


def test_interrupted_leaves_with_130() -> None:
    interrupted = "def stop(*a, **k): raise KeyboardInterrupt\nimport pagedweight.cli.doctor as d\nd.look = stop\n"
    done = python(interrupted + "from pagedweight.cli.main import main\nmain(['doctor'])")
    assert done.returncode == 130
    assert "Traceback" not in done.stderr
