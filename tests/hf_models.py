"""Tiny random MoE models of the families that pagedweight serves, with expert weights large enough to be seen."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn
from transformers import (
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
)

import pagedweight
from pagedweight.bitplane import dequantize
from pagedweight.checkpoint import Checkpoint
from pagedweight.discovery import find_experts
from pagedweight.layout import BlockId, PackedBlock

VOCABULARY = 128
COMMON = {
    "vocab_size": VOCABULARY,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}


def build(make: Callable[[], PreTrainedModel], seed: int) -> PreTrainedModel:
    """The model on the CPU in fp32 and eval mode; eager experts, since the grouped kernel refuses some of our sizes."""
    torch.manual_seed(seed)
    model = make().eval()
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            # 0.5: at the 0.02 of a fresh model an expert's output is so small that a wrong one hides in the tolerance.
            nn.init.normal_(parameter, std=0.5)
    model.set_experts_implementation("eager")
    return model


def mixtral_m8(seed: int = 0, **changes) -> PreTrainedModel:
    """M8: 8 experts, top 2, hidden 64, intermediate 96."""
    settings = {
        **COMMON,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_key_value_heads": 2,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": None,
        **changes,
    }
    return build(lambda: MixtralForCausalLM(MixtralConfig(**settings)), seed)


def qwen2_moe_q60(seed: int = 0, **changes) -> PreTrainedModel:
    """Q60: 60 experts, top 4 without renormalisation, shared expert; K = 44 in down."""
    settings = {
        **COMMON,
        "hidden_size": 64,
        "intermediate_size": 80,
        "moe_intermediate_size": 44,
        "shared_expert_intermediate_size": 80,
        "num_key_value_heads": 4,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "norm_topk_prob": False,
        **changes,
    }
    return build(lambda: Qwen2MoeForCausalLM(Qwen2MoeConfig(**settings)), seed)


def gemma4_g16(seed: int = 0, **changes) -> PreTrainedModel:
    """G16: 16 experts, top 8, GELU-tanh, tied embeddings, one sliding layer (window 16) and one full layer."""
    settings = {
        **COMMON,
        "hidden_size": 88,
        "intermediate_size": 48,
        "moe_intermediate_size": 22,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "global_head_dim": 16,
        "num_experts": 16,
        "top_k_experts": 8,
        "enable_moe_block": True,
        "hidden_size_per_layer_input": 0,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"],
        **changes,
    }
    return build(lambda: Gemma4ForCausalLM(Gemma4TextConfig(**settings)), seed)


FAMILIES: dict[str, Callable[..., PreTrainedModel]] = {
    "M8": mixtral_m8,
    "Q60": qwen2_moe_q60,
    "G16": gemma4_g16,
}


def tokens(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    """Random token ids (B, T) above the special ones."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (batch, length), generator=generator)


@functools.cache
def quantized_folder(family: str) -> Path:
    """A folder with the family's default model, quantized once per test process."""
    folder = Path(tempfile.mkdtemp(prefix="pagedweight-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return pagedweight.quantize(FAMILIES[family](), folder)


class DenseReference:
    """The family's own model, its dense weights rebuilt from a folder's codes: no pages, no kernels, no runtime."""

    def __init__(self, family: str, folder: Path | None = None) -> None:
        self._open(FAMILIES[family](), folder or quantized_folder(family))

    @classmethod
    def of(cls, model: PreTrainedModel, folder: Path) -> DenseReference:
        """For a model whose experts may be overwritten."""
        reference = cls.__new__(cls)
        reference._open(model, folder)
        return reference

    def _open(self, model: PreTrainedModel, folder: Path) -> None:
        self.model = model
        checkpoint = Checkpoint.open(folder)
        self.layout = checkpoint.layout
        self._blocks: list[tuple[BlockId, PackedBlock]] = [(b, checkpoint.block(b)) for b in self.layout.blocks()]
        self._experts = {experts.shape.layer: experts for experts in find_experts(model)}
        self._weights = {
            layer: tuple(weight.float().clone() for weight in experts.weights())
            for layer, experts in self._experts.items()
        }
        self._at = np.zeros(len(self._blocks), dtype=np.int64)

    @torch.no_grad()
    def set_bits(self, bits: np.ndarray | int) -> PreTrainedModel:
        """The model with every linear-block at its width."""
        wanted = np.broadcast_to(bits, self._at.shape)
        changed = set()
        for row in np.flatnonzero(wanted != self._at):
            (layer, expert, projection), packed = self._blocks[row]
            self._weights[layer][projection][expert] = dequantize(packed, int(wanted[row]))
            changed.add(layer)
        for layer in changed:
            self._experts[layer].put_weights(*(weight.clone() for weight in self._weights[layer]))
        self._at = wanted.copy()
        return self.model
