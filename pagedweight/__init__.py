"""MoE expert weights and the KV cache share one GPU memory.

Once for each model:

    quantize(model_or_path, out)    its routed experts as pages, in a folder
    calibrate(out, text)            what each page is worth to the planner

Then, with one budget for expert weights and KV cache:

    config = RuntimeConfig(budget_bytes=10 * 2**30)
    model = from_pretrained(out, config=config, device_map="cuda")
    cache = model.pagedweight.new_cache()
    model.generate(**prompt, past_key_values=cache)
    print(model.pagedweight.snapshot())

A model that is in memory: patch() and unpatch(), save() and load(). compile_kernels() compiles ahead what would be
compiled as batches come. CheckpointError says what is wrong with a folder, OutOfFrames that a budget is used up.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from pagedweight.integrations.hf_register import has_transformers as _has_transformers
from pagedweight.integrations.hf_register import need_transformers as _need_transformers
from pagedweight.integrations.hf_register import register as _register

if TYPE_CHECKING:
    from pagedweight.calibration.pipeline import calibrate
    from pagedweight.checkpoint import CheckpointError
    from pagedweight.compiling import compile_kernels
    from pagedweight.integrations.hf_quantizer import PagedWeightConfig
    from pagedweight.patching import patch, unpatch
    from pagedweight.policy import Policy
    from pagedweight.quantizing import quantize
    from pagedweight.runtime.config import RuntimeConfig
    from pagedweight.runtime.frames import OutOfFrames
    from pagedweight.saving import from_pretrained, load
    from pagedweight.saving_patched import save

__version__ = "0.1.0"
__all__ = [
    "CheckpointError",
    "OutOfFrames",
    "PagedWeightConfig",
    "Policy",
    "RuntimeConfig",
    "calibrate",
    "compile_kernels",
    "from_pretrained",
    "load",
    "patch",
    "quantize",
    "save",
    "unpatch",
]

# Resolved on first use, so that `import pagedweight` (and the CLI's --help) loads neither torch nor triton.
_HOMES = {
    "CheckpointError": "checkpoint",
    "OutOfFrames": "runtime.frames",
    "PagedWeightConfig": "integrations.hf_quantizer",
    "Policy": "policy",
    "RuntimeConfig": "runtime.config",
    "calibrate": "calibration.pipeline",
    "compile_kernels": "compiling",
    "from_pretrained": "saving",
    "load": "saving",
    "patch": "patching",
    "quantize": "quantizing",
    "save": "saving_patched",
    "unpatch": "patching",
}
# These load a model or its tokenizer, whatever they are given.
_NEED_TRANSFORMERS = {"PagedWeightConfig", "calibrate", "from_pretrained", "load"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'pagedweight' has no attribute {name!r}")
    if name in _NEED_TRANSFORMERS:
        _need_transformers(f"pagedweight.{name}")
    return getattr(import_module(f"pagedweight.{_HOMES[name]}"), name)


_register()


def __dir__() -> list[str]:
    """What can be had here: help() asks for each of them."""
    return sorted(set(globals()) | set(_HOMES) - (set() if _has_transformers() else _NEED_TRANSFORMERS))
