"""Where a model's experts belong when it is spread over devices, and which devices will not do."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryFile

import torch
from torch import nn

from pagedweight.discovery_experts import ExpertsModule


def devices_of(model: nn.Module, found: Iterable[ExpertsModule]) -> list[torch.device]:
    """Where each experts module of a loaded model belongs, by its device map; it need not have weights."""
    placed = getattr(model, "hf_device_map", None) or {"": model.device}
    chosen = []
    for experts in found:
        around = [name for name in placed if not name or f"{experts.path}.".startswith(f"{name}.")]
        place = placed[max(around, key=len)] if around else model.device
        if place == "disk":
            raise ValueError(f"{experts.path} is offloaded to disk by accelerate; load the model on GPUs alone")
        device = torch.device("cuda", place) if isinstance(place, int) else torch.device(place)
        chosen.append(torch.device("cuda", torch.cuda.current_device()) if device == torch.device("cuda") else device)
    refuse_mixed_devices(set(chosen))
    return chosen


def refuse_mixed_devices(devices: set[torch.device]) -> None:
    """ValueError for weights on GPUs and elsewhere, or on a disk."""
    if len({device.type for device in devices}) > 1:
        raise ValueError(
            f"expert weights are spread over {', '.join(sorted(map(str, devices)))}; load the model on GPUs alone, or "
            "on the CPU"
        )


def kernel_cache_folder() -> Path:
    """Where Triton puts compiled kernels."""
    from triton import knobs

    return Path(knobs.cache.dir)


def refuse_unwritable(folder: Path) -> None:
    """ValueError when kernels could not be compiled, since there is nowhere to put them."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(
            f"kernels are compiled into {folder}, which cannot be written ({error.strerror}); set TRITON_CACHE_DIR to "
            "a folder that can"
        ) from error


def refuse_old_device(device: torch.device, found: Iterable[ExpertsModule]) -> None:
    """ValueError when pages cannot move to a GPU, or the kernels cannot run there or not in the model's dtype."""
    if device.type != "cuda":
        return
    if torch.version.hip is not None:
        raise ValueError(f"{device} is AMD's, and pages move through CUDA's driver; patch the model on the CPU")
    capability = torch.cuda.get_device_capability(device)
    version = ".".join(map(str, capability))
    if capability < (7, 5):
        raise ValueError(f"{device} has compute capability {version}; the kernels need 7.5 or later")
    if capability < (8, 0) and any(experts.dtype == torch.bfloat16 for experts in found):
        raise ValueError(f"{device} has compute capability {version} and no bfloat16; load the model in float16")
