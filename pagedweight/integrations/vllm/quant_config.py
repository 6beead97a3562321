"""vLLM's quantization config named in a quantized folder's config.json, or by quantization="pagedweight"."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase

from pagedweight.integrations.vllm.moe_method import PagedExpertsMethod, SelfRoutingExpertsMethod
from pagedweight.integrations.vllm.options import KEY, ServingOptions
from pagedweight.integrations.vllm.page_source import choose_source
from pagedweight.integrations.vllm.rank_experts import RankExperts
from pagedweight.integrations.vllm.versions import cpu_router, is_routed_experts, kv_piece_bytes


class PagedWeightConfig(QuantizationConfig):
    """Routed experts are paged, everything else is as in the float model. rank: a worker's experts, once it builds."""

    def __init__(self) -> None:
        super().__init__()
        self.rank: RankExperts | None = None

    def get_name(self) -> str:
        return KEY

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> PagedWeightConfig:
        return cls()

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        if is_routed_experts(layer):
            if self.rank is None:
                self.rank = new_rank(get_current_vllm_config())
            method = PagedExpertsMethod if cpu_router() is None else SelfRoutingExpertsMethod
            return method(layer, prefix, self.rank)
        return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None


def new_rank(config: VllmConfig) -> RankExperts:
    """What this worker will hold of the model's experts; ValueError for a set-up that is not served."""
    check_served(config)
    options = ServingOptions.of(config.additional_config)
    source = choose_source(config.model_config.model, str(config.load_config.load_format), options)
    kind = config.device_config.device_type
    device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
    captured = config.compilation_config.cudagraph_capture_sizes or ()
    batches = (*captured, config.scheduler_config.max_num_batched_tokens)
    return RankExperts(source, options, device, batches, lambda: kv_piece_bytes(config))


def check_served(config: VllmConfig) -> None:
    """ValueError, one sentence, for what would go wrong later."""
    parallel = config.parallel_config
    refused = {
        "pipeline_parallel_size": parallel.pipeline_parallel_size > 1,
        "data_parallel_size": parallel.data_parallel_size > 1,
        "enable_eplb": parallel.enable_eplb,
        "enable_sleep_mode": config.model_config.enable_sleep_mode,
        # Its workers' steps pass by the one place where pages are moved: other blocks would be read than are there.
        "distributed_executor_backend=ray": parallel.distributed_executor_backend == "ray",
    }
    for name, wanted in refused.items():
        if wanted:
            raise ValueError(f"pagedweight does not serve with {name} yet; leave it out")
    if config.lora_config is not None:
        _check_adapters(config.lora_config.target_modules)


def _check_adapters(modules: list[str] | None) -> None:
    """ValueError where an adapter could change experts: without a list vLLM makes room for that in every layer."""
    if modules is None or any("expert" in name for name in modules):
        raise ValueError(
            f"lora_target_modules is {modules}; pagedweight serves adapters of other layers than routed experts: name "
            "those, such as qkv_proj and o_proj"
        )
