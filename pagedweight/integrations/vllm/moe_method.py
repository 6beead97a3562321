"""vLLM's MoE method over paged planes: routing, shared experts and reductions stay with vLLM."""

from __future__ import annotations

import re

import torch
from torch import nn
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.utils import set_weight_attrs

from pagedweight.experts import PagedExperts
from pagedweight.integrations.vllm.page_source import FloatExperts
from pagedweight.integrations.vllm.rank_experts import RankExperts
from pagedweight.integrations.vllm.shares import ExpertShare
from pagedweight.integrations.vllm.versions import activation_of, cpu_router

ACTIVATIONS = ("silu", "gelu_tanh")  # each the same in vLLM's words and in layout.ACTIVATIONS


class PagedExpertsMethod(FusedMoEMethodBase):
    """One MoE layer's weights and computation. Holds no parameters, but while float experts are being quantized."""

    # A plain attribute, not the base's property: it is read where torch.compile traces.
    is_monolithic = False

    def __init__(self, layer: nn.Module, prefix: str, rank: RankExperts) -> None:
        super().__init__(layer.moe_config)
        self._rank = rank
        self._layer = layer_number(prefix)
        self._experts: PagedExperts | None = None

    def create_weights(
        self,
        layer: nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **attributes: object,
    ) -> None:
        share = self._share(layer, hidden_size, intermediate_size_per_partition)
        self._index = self._rank.add(share)
        if not self._rank.source.needs_float:
            return
        shapes = {
            "w13_weight": (num_experts, 2 * intermediate_size_per_partition, hidden_size),
            "w2_weight": (num_experts, hidden_size, intermediate_size_per_partition),
        }
        for name, shape in shapes.items():
            weight = nn.Parameter(torch.empty(shape, dtype=params_dtype), requires_grad=False)
            layer.register_parameter(name, weight)
            set_weight_attrs(weight, attributes)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        float_experts = None
        if self._rank.source.needs_float:
            float_experts = FloatExperts(layer.w13_weight.data, layer.w2_weight.data)
        self._experts = self._rank.fill(self._index, float_experts)
        self._rank.compile(self._experts, layer.moe_config.experts_per_token, layer.moe_config.in_dtype)
        if float_experts is not None:
            del layer.w13_weight, layer.w2_weight

    def get_fused_moe_quant_config(self, layer: nn.Module) -> None:
        return None

    def apply(
        self, layer: nn.Module, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, **_: object
    ) -> torch.Tensor:
        """(T, H) from this rank's experts; vLLM adds up the ranks'."""
        if layer.expert_map is not None:
            topk_ids = layer.expert_map[topk_ids.long()]  # -1 for experts of other ranks, which add nothing here
        return self._experts(x, topk_ids, topk_weights)

    def _share(self, layer: nn.Module, hidden: int, intermediate: int) -> ExpertShare:
        parallel = layer.moe_config.moe_parallel_config
        activation = activation_of(layer, get_current_vllm_config())
        if activation not in ACTIVATIONS:
            raise ValueError(
                f"layer {self._layer} uses {activation!r}; pagedweight serves {', '.join(ACTIVATIONS)}: "
                "serve this model without it"
            )
        if layer.apply_router_weight_on_input or layer.moe_config.has_bias:
            raise ValueError(
                f"layer {self._layer} has biases or weighs its inputs, which pagedweight does not serve under vLLM; "
                "serve this model without it"
            )
        here = [e for e in range(layer.global_num_experts) if layer._map_global_expert_id_to_local_expert_id(e) >= 0]
        here.sort(key=layer._map_global_expert_id_to_local_expert_id)
        total = layer.global_num_experts
        return ExpertShare(
            self._layer, tuple(here), total, hidden, intermediate, activation, parallel.tp_rank, parallel.tp_size
        )


class SelfRoutingExpertsMethod(PagedExpertsMethod):
    """The same, choosing experts itself: on a CPU vLLM 0.20's own router calls a CUDA kernel."""

    is_monolithic = True

    def apply_monolithic(
        self, layer: nn.Module, x: torch.Tensor, router_logits: torch.Tensor, **_: object
    ) -> torch.Tensor:
        weights, ids = cpu_router()(
            x,
            router_logits,
            layer.top_k,
            layer.use_grouped_topk,
            layer.renormalize,
            layer.topk_group,
            layer.num_expert_group,
            layer.custom_routing_function,
            layer.scoring_func,
            layer.routed_scaling_factor,
            layer.e_score_correction_bias,
        )
        return self.apply(layer, x, weights, ids)


def layer_number(prefix: str) -> int:
    """The model's own layer number in a module's name, such as model.layers.3.mlp.experts."""
    found = re.search(r"(?:^|\.)layers\.(\d+)(?:\.|$)", prefix)
    if found is None:
        raise ValueError(f"{prefix!r} names no layer; pagedweight knows expert pages by their layer's number")
    return int(found[1])
