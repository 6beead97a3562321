"""Everything that differs between the vLLM versions served, and the check that this is one of them."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

OLDEST = (0, 20, 1)
BEYOND = (0, 34, 0)


def check_version(version: str) -> None:
    """ImportError, before anything is registered, unless a vLLM version is one that this integration was tried with."""
    numbers = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
    found = tuple(int(part or 0) for part in numbers.groups()) if numbers else None
    if found is None or not OLDEST <= found < BEYOND:
        raise ImportError(
            f"vLLM is {version}; pagedweight serves {_dotted(OLDEST)} up to, but not including, {_dotted(BEYOND)}: "
            "install one of these, or set VLLM_PLUGINS to leave pagedweight out"
        )


def is_routed_experts(layer: nn.Module) -> bool:
    """Whether a layer is the one that holds routed expert weights: FusedMoE of old, RoutedExperts of late."""
    names = ("FusedMoE", "RoutedExperts")
    return any(kind.__name__ in names and kind.__module__.startswith("vllm.") for kind in type(layer).__mro__)


def activation_of(layer: nn.Module, config: Any) -> str:
    """What a layer's experts apply, in vLLM's word. 0.20 has one word for two kinds of GELU, and gives Gemma-4 another
    than its config names."""
    named = getattr(layer.activation, "value", layer.activation)
    meant = getattr(config.model_config.hf_text_config, "hidden_activation", None)
    return "gelu_tanh" if (named, meant) == ("gelu", "gelu_pytorch_tanh") else named


def cpu_router() -> Callable[..., tuple[torch.Tensor, torch.Tensor]] | None:
    """The router that experts must call themselves on a CPU, where a version's own calls a CUDA kernel; else None."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return None
    try:
        from vllm.model_executor.layers.fused_moe.cpu_fused_moe import select_experts
    except ImportError:  # later versions route in plain torch
        return None
    return select_experts


def watch_batches(runner: Any, tell: Callable[[Sequence[str], np.ndarray], None]) -> bool:
    """Have the requests of each batch told, and how many tokens of each, in the order of the batch, before its forward.

    False where a model runner has no such place.
    """
    if original := getattr(runner, "_prepare_inputs", None):

        @functools.wraps(original)
        def prepare(scheduler_output: Any, num_scheduled_tokens: np.ndarray) -> Any:
            prepared = original(scheduler_output, num_scheduled_tokens)
            tell(runner.input_batch.req_ids, num_scheduled_tokens)
            return prepared

        runner._prepare_inputs = prepare
    elif original := getattr(runner, "prepare_inputs", None):  # the second model runner of later versions

        @functools.wraps(original)
        def prepare_batch(*args: Any, **kwargs: Any) -> Any:
            batch = original(*args, **kwargs)
            tell(batch.req_ids, batch.num_scheduled_tokens)
            return batch

        runner.prepare_inputs = prepare_batch
    return original is not None


def kv_piece_bytes(config: Any) -> int:
    """Bytes of the smallest contiguous part of a KV block of any layer: K or V alone, as some layouts keep them apart.

    Asked after the model is built. 0 when no layer caches anything.
    """
    layers = config.compilation_config.static_forward_context.values()
    specs = [layer.get_kv_cache_spec(config) for layer in layers if hasattr(layer, "get_kv_cache_spec")]
    return min((spec.page_size_bytes // 2 for spec in specs if spec is not None), default=0)


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
