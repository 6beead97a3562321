"""`pagedweight doctor`: what it makes of machines of every kind, and how it leaves."""

from __future__ import annotations

import json
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from pagedweight.cli import doctor
from pagedweight.cli.doctor_checks import BAD, GOOD, NOTE, Gpu, Machine, judge, look, numbers
from pagedweight.cli.main import app

RUNNER = CliRunner()
VERSIONS = {"torch": "2.11.0+cu130", "triton": "3.6.0", "numpy": "2.1.0", "scipy": "1.15", "safetensors": "0.6"}
PACKAGES = MappingProxyType({**VERSIONS, "transformers": "5.17.0", "accelerate": "1.15.0", "vllm": None})
LEAST = MappingProxyType({"torch": "2.8", "triton": "3.4", "numpy": "1.26", "scipy": "1.11", "safetensors": "0.5"})
REQUIRED = MappingProxyType({**LEAST, "transformers": "5.9", "accelerate": "1.1"})
H200 = Gpu("NVIDIA H200", (9, 0), 139 * 2**30)
EXTRAS = MappingProxyType({"hf": True, "plots": True, "serve": True, "eval": True})
HOPPER = Machine("3.12.3", "Linux x86_64", PACKAGES, REQUIRED, "13.0", "3.6.0", "580.65.06", (H200,), EXTRAS)


def states(machine: Machine) -> dict[str, str]:
    return {check.name: check.state for check in judge(machine)}


def with_packages(**versions: str | None) -> Machine:
    return HOPPER._replace(packages={**PACKAGES, **versions})


def test_the_machine_that_everything_was_measured_on_is_good() -> None:
    found = states(HOPPER)
    assert found.pop("vllm") == NOTE  # not installed
    assert set(found.values()) == {GOOD}


@pytest.mark.parametrize(
    ("machine", "name", "state", "advice"),
    [
        (with_packages(torch="2.7.1"), "torch", BAD, "torch>=2.8"),  # below the bound
        (with_packages(torch="2.99.0"), "torch", NOTE, "2.13"),  # nobody tried it
        (with_packages(scipy=None), "scipy", BAD, "pip install"),
        (with_packages(transformers=None), "transformers", NOTE, "pagedweight[hf]"),  # an extra
        (with_packages(transformers="5.8.2"), "transformers", BAD, "transformers>=5.9"),
        (with_packages(triton=None), "triton", BAD, "triton>=3.4"),
        (with_packages(triton="3.3.1"), "triton", BAD, "3.4"),
        (with_packages(triton="3.7.0"), "triton", NOTE, "triton==3.6.0"),  # not the one torch asks for
        (with_packages(triton="3.5.0"), "GPU 0", NOTE, "3.6"),  # prefill kernels need a later one
        (with_packages(vllm="0.33.0"), "vllm", GOOD, ""),
        (with_packages(vllm="0.20.0"), "vllm", BAD, "VLLM_PLUGINS"),
        (with_packages(vllm="0.34.0"), "vllm", BAD, "install one of these"),
        (HOPPER._replace(gpus=(Gpu("V100", (7, 0), 2**34),)), "GPU 0", BAD, "7.5"),
        (HOPPER._replace(gpus=(Gpu("T4", (7, 5), 2**34),)), "GPU 0", NOTE, "float16"),
        (HOPPER._replace(gpus=(Gpu("A100", (8, 0), 2**36),)), "GPU 0", NOTE, "portable"),
        (HOPPER._replace(gpus=(H200, Gpu("V100", (7, 0), 2**34))), "GPU 1", BAD, "7.5"),
        (HOPPER._replace(gpus=()), "GPU", BAD, "CUDA 13.0"),  # the driver is too old for this torch
        (HOPPER._replace(gpus=(), torch_cuda=None), "GPU", BAD, "constraints-cpu.txt"),  # a CPU build beside a driver
        (HOPPER._replace(gpus=(), torch_cuda=None, driver=None), "GPU", NOTE, "slowly"),
        (HOPPER._replace(extras={**EXTRAS, "serve": False}), "extras", NOTE, "pagedweight[serve]"),
    ],
)
def test_what_is_wrong_is_said_with_what_to_change(machine: Machine, name: str, state: str, advice: str) -> None:
    check = next(check for check in judge(machine) if check.name == name)
    assert check.state == state
    assert advice in check.advice


RELEASES = st.sampled_from([None, "0.1", "2.8", "2.11.0+cu130", "3.3.1", "3.6.0", "3.9", "5.17.0", "99.1rc1"])
GPUS = st.builds(Gpu, st.just("a GPU"), st.tuples(st.integers(5, 12), st.integers(0, 9)), st.just(2**34))
MACHINES = st.builds(
    Machine,
    python=st.just("3.12.3"),
    system=st.just("Linux x86_64"),
    packages=st.fixed_dictionaries(dict.fromkeys(PACKAGES, RELEASES)).filter(lambda p: p["torch"] is not None),
    required=st.sampled_from([REQUIRED, {}]),
    torch_cuda=st.none() | st.just("13.0"),
    torch_triton=st.none() | st.just("3.6.0"),
    driver=st.none() | st.just("580.65.06"),
    gpus=st.lists(GPUS, max_size=2).map(tuple),
    extras=st.fixed_dictionaries(dict.fromkeys(EXTRAS, st.booleans())),
)


@given(MACHINES)
def test_every_finding_of_any_machine_says_what_to_change_and_only_those(machine: Machine) -> None:
    for check in judge(machine):
        assert bool(check.advice) == (check.state != GOOD), check


@given(st.tuples(*[st.integers(0, 99)] * 3), st.sampled_from(["", "+cu130", "rc1", ".dev2", "a0+git1"]))
def test_versions_are_read_with_any_ending(version: tuple[int, int, int], ending: str) -> None:
    assert numbers(".".join(map(str, version)) + ending)[:3] == version


def test_versions_are_told_where_the_package_is_not_installed_but_only_on_the_path() -> None:
    assert {c.name: c.state for c in judge(HOPPER._replace(required={}))}["torch"] == GOOD


def test_this_machine_is_looked_at() -> None:
    machine = look()
    assert machine.packages["torch"]
    assert set(machine.required) >= {"torch", "safetensors", "numpy"}
    result = RUNNER.invoke(app, ["doctor", "--json"])
    document = json.loads(result.stdout)
    assert {check["name"] for check in document["checks"]} >= {"Python", "torch", "triton", "vllm"}
    assert result.exit_code == (1 if any(check["state"] == BAD for check in document["checks"]) else 0)


def test_the_table_names_every_check_and_what_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagedweight.cli.doctor.look", lambda: with_packages(torch="2.7.1"))
    result = RUNNER.invoke(app, ["doctor"])
    assert result.exit_code == 1
    for word in ("torch", "2.7.1", "too old", "NVIDIA H200", "1 to change"):
        assert word in result.stdout


def test_an_extra_is_named_with_its_brackets(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    doctor._print(judge(with_packages(transformers=None)))
    assert "pip install 'pagedweight[hf]'" in capsys.readouterr().out
