"""What `pagedweight doctor` looks at, and what it makes of it: a machine as values, and checks that are pure."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import NamedTuple

from pagedweight.cli.common import EXTRA_MODULES, missing_of

GOOD, NOTE, BAD = "good", "note", "bad"
PACKAGES = ("torch", "triton", "numpy", "scipy", "safetensors", "transformers", "accelerate", "vllm")
# First and last release that all tests of a part were run with; others may well do.
TRIED = {"torch": ("2.11", "2.13"), "triton": ("3.6", "3.9"), "transformers": ("5.9", "5.24")}
LEAST_CAPABILITY, BF16_CAPABILITY, PREFILL_CAPABILITY = (7, 5), (8, 0), 9
PREFILL_TRITON = (3, 6)
GIB = 2**30


class Check(NamedTuple):
    """One finding. state: good, note (works, with less than there could be) or bad. advice: what to change, if any."""

    name: str
    state: str
    found: str
    advice: str = ""


class Gpu(NamedTuple):
    name: str
    capability: tuple[int, int]
    memory_bytes: int


class Machine(NamedTuple):
    """What is installed. packages: version by name, None where missing. required: pagedweight's own lower bounds.

    torch_cuda: CUDA release that torch was built for, None for a CPU build. torch_triton: the Triton that torch's own
    metadata asks for, None when it asks for none. driver: the NVIDIA driver's version, None without one.
    gpus: those that torch can use. extras: whether all packages of an extra of commands' are there, by its name.
    """

    python: str
    system: str
    packages: Mapping[str, str | None]
    required: Mapping[str, str]
    torch_cuda: str | None
    torch_triton: str | None
    driver: str | None
    gpus: tuple[Gpu, ...]
    extras: Mapping[str, bool]


def look() -> Machine:
    """This machine. Imports torch, and nothing else that is heavy."""
    import torch

    gpus = []
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            seen = torch.cuda.get_device_properties(index)
            gpus.append(Gpu(seen.name, (seen.major, seen.minor), seen.total_memory))
    wanted = _bounds("torch", r"\s*==\s*([\w.]+)").get("triton")
    return Machine(
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        packages={name: _version(name) for name in PACKAGES},
        required=_bounds("pagedweight", r"\s*>=\s*([\w.]+)"),
        torch_cuda=torch.version.cuda,
        torch_triton=wanted,
        driver=_driver(),
        gpus=tuple(gpus),
        extras={extra: not missing_of(extra) for extra in EXTRA_MODULES if extra != "vllm"},
    )


def judge(machine: Machine) -> list[Check]:
    """Every check, in the order in which a person would mend things."""
    return [
        Check("Python", GOOD, f"{machine.python} on {machine.system}"),
        *_packages(machine),
        _triton(machine),
        *_devices(machine),
        _vllm(machine.packages.get("vllm")),
        _extras(machine.extras),
    ]


def _packages(machine: Machine) -> Iterator[Check]:
    for name, found in machine.packages.items():
        least = machine.required.get(name, "0")
        if name in ("triton", "vllm"):
            continue
        if found is None and name in ("transformers", "accelerate"):
            yield Check(name, NOTE, "not installed", "pip install 'pagedweight[hf]': models are loaded with it")
        elif found is None:
            yield Check(name, BAD, "not installed", f"pip install '{name}>={least}'")
        elif numbers(found) < numbers(least):
            yield Check(name, BAD, found, f"pip install --upgrade '{name}>={least}': too old")
        else:
            yield _tried(name, found)


def _tried(name: str, found: str) -> Check:
    first, last = TRIED.get(name, (None, None))
    if first is None or numbers(first) <= numbers(found)[:2] <= numbers(last):
        return Check(name, GOOD, found)
    return Check(
        name,
        NOTE,
        found,
        f"nothing while all goes well; {first} to {last} were tested, so try one of these if something fails",
    )


def _triton(machine: Machine) -> Check:
    found, least = machine.packages.get("triton"), machine.required.get("triton", "0")
    if found is None:
        where = (
            f"pip install 'triton>={least}'" if machine.torch_cuda else "install a CUDA build of torch, which brings it"
        )
        advice = f"{where}: without it models run on the CPU alone"
        return Check("triton", BAD if machine.gpus else NOTE, "not installed", advice)
    if numbers(found) < numbers(least):
        return Check("triton", BAD, found, f"install a torch that brings triton {least} or later: too old")
    if machine.gpus and machine.torch_triton and numbers(machine.torch_triton)[:2] != numbers(found)[:2]:
        return Check(
            "triton",
            NOTE,
            found,
            f"pip install 'triton=={machine.torch_triton}', which this torch asks for",
        )
    return _tried("triton", found)


def _devices(machine: Machine) -> Iterator[Check]:
    if not machine.gpus:
        yield _no_gpu(machine)
        return
    yield Check("driver", GOOD, f"{machine.driver or 'unknown'}, torch built for CUDA {machine.torch_cuda}")
    for index, gpu in enumerate(machine.gpus):
        yield _gpu(f"GPU {index}", gpu, numbers(machine.packages.get("triton") or "0"))


def _no_gpu(machine: Machine) -> Check:
    slow = "use a machine with an NVIDIA GPU for more than small models: plain torch works here, slowly"
    if machine.driver is None:
        return Check("GPU", NOTE, "none", slow)
    if machine.torch_cuda is None:
        return Check(
            "GPU",
            BAD,
            f"driver {machine.driver}, but torch {machine.packages['torch']} is a CPU build",
            "install torch without -c constraints-cpu.txt, from an index with CUDA builds",
        )
    return Check(
        "GPU",
        BAD,
        f"driver {machine.driver}, but torch, built for CUDA {machine.torch_cuda}, cannot use a GPU",
        f"update the driver to one that serves CUDA {machine.torch_cuda}, or install a torch for an older CUDA; "
        "in a container, see that the GPU is passed in",
    )


def _gpu(name: str, gpu: Gpu, triton: tuple[int, ...]) -> Check:
    capability = ".".join(map(str, gpu.capability))
    found = f"{gpu.name}, compute capability {capability}, {gpu.memory_bytes / GIB:.0f} GiB"
    if gpu.capability < LEAST_CAPABILITY:
        return Check(name, BAD, found, "use a GPU of compute capability 7.5 or later, which the kernels need")
    if gpu.capability < BF16_CAPABILITY:
        return Check(name, NOTE, found, "load models with dtype=torch.float16: it has no bfloat16")
    if gpu.capability[0] != PREFILL_CAPABILITY:
        return Check(
            name,
            NOTE,
            found,
            "nothing; batches of more than 64 tokens take the portable kernels, the faster ones are Hopper's",
        )
    if triton[:2] < PREFILL_TRITON:
        return Check(
            name,
            NOTE,
            found,
            "install a torch that brings triton 3.6: the faster kernels for more than 64 tokens need it",
        )
    return Check(name, GOOD, found)


def _vllm(found: str | None) -> Check:
    if found is None:
        return Check("vllm", NOTE, "not installed", "pip install 'pagedweight[vllm]', to serve with vLLM only")
    from pagedweight.integrations.vllm.versions import check_version

    try:
        check_version(found)
    except ImportError as error:
        return Check("vllm", BAD, found, str(error).partition("; ")[2])
    return Check("vllm", GOOD, found)


def _extras(found: Mapping[str, bool]) -> Check:
    there, missing = ([name for name, has in found.items() if has is wanted] for wanted in (True, False))
    said = f"{', '.join(there) or 'none'} installed" + (f", not {', '.join(missing)}" if missing else "")
    if not missing:
        return Check("extras", GOOD, said)
    return Check(
        "extras", NOTE, said, f"pip install 'pagedweight[{','.join(missing)}]', for the commands that need them"
    )


def numbers(version: str) -> tuple[int, ...]:
    """(2, 13, 0) of "2.13.0+cpu"."""
    return tuple(int(part) for part in re.findall(r"\d+", re.split(r"[+a-z]", version)[0]))


def _version(package: str) -> str | None:
    """A package's version, None when it is not installed; vLLM for CPUs goes by another name."""
    for name in (package, f"{package}-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def _bounds(distribution: str, bound: str) -> dict[str, str]:
    """Version by package that a distribution's metadata asks for with a bound of this form."""
    try:
        wanted = metadata.requires(distribution) or []
    except metadata.PackageNotFoundError:
        return {}
    found = (re.match(rf"([\w-]+){bound}", requirement) for requirement in wanted)
    return {match[1]: match[2] for match in found if match}


def _driver() -> str | None:
    """The NVIDIA driver's version; None when there is none, or it does not answer."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    command = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (subprocess.SubprocessError, OSError):
        return None
    return next(iter(said.split()), None)
