"""Every family of transformers whose routed experts are served, as a tiny random model; writes docs/families.md.

python -m tests.hf_families docs/families.md
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from packaging.version import Version
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from pagedweight.discovery import ExpertsModule, find_experts
from pagedweight.discovery_storage import DbrxStorage
from tests.hf_models import VOCABULARY, build, tokens

# For every configuration the part of this that it knows.
SIZES: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 24,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "top_k_experts": 2,
    "moe_top_k": 2,
    "moe_k": 2,
    "max_position_embeddings": 128,
    "shared_expert_intermediate_size": 24,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "sliding_window": 16,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
LATENT = {"head_dim": None, "num_key_value_heads": 4}  # attention over a latent has head sizes of its own
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
}


class Family(NamedTuple):
    """changes: to SIZES, None takes one away. since: the transformers release from which its experts are served."""

    changes: Mapping[str, Any] = {}
    since: str = "5.9"


FAMILIES: Mapping[str, Family] = {
    "afmoe": Family(),
    "aria_text": Family(since="5.18"),
    "axk1": Family(LATENT, since="5.17"),
    "axk2": Family(LATENT, since="5.17"),
    "cohere2_moe": Family(),
    "dbrx": Family(
        {
            "d_model": 32,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": 128,
            "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
            "ffn_config": {"ffn_hidden_size": 24, "hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
        },
        since="5.17",  # the model itself does not run on 5.9
    ),
    "deepseek_v2": Family(LATENT),
    "deepseek_v3": Family(LATENT),
    "deepseek_v32": Family(LATENT, since="5.17"),
    "deepseek_v4": Family(since="5.17"),
    "dots1": Family(),
    "ernie4_5_moe": Family(),
    "exaone_moe": Family(),
    "flex_olmo": Family(),
    "gemma4_text": Family({"enable_moe_block": True, "hidden_size_per_layer_input": 0, "global_head_dim": 8}),
    "glm4_moe": Family(),
    "glm4_moe_lite": Family(LATENT),
    "glm_moe_dsa": Family(LATENT, since="5.17"),
    "gpt_oss": Family(),
    "granitemoe": Family(since="5.13"),
    "granitemoe_swa": Family(since="5.17"),
    "granitemoehybrid": Family({"layer_types": ["attention", "attention"], "mamba_n_heads": 8}, since="5.13"),
    "granitemoeshared": Family(since="5.13"),
    "hunyuan_v1_moe": Family(),
    "hy_v3": Family(),
    "hy_v4": Family(since="5.17"),
    "jamba": Family({"attn_layer_period": 2, "attn_layer_offset": 0, "use_mamba_kernels": False}),
    "kimi_linear": Family(
        {
            **LATENT,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_head_dim": 8,
            "linear_num_heads": 2,
        },
        since="5.17",
    ),
    "laguna": Family(since="5.17"),
    "lfm2_moe": Family({"layer_types": ["conv", "full_attention"], "num_dense_layers": 1}),
    "llama4_text": Family({"num_experts_per_tok": 1, "interleave_moe_layer_step": 1, "intermediate_size_mlp": 24}),
    "mellum": Family(since="5.17"),
    "mimo_v2_flash": Family(since="5.17"),
    "minimax": Family(),
    "minimax_m2": Family(),
    "mixtral": Family(),
    "nemotron_h": Family({"layers_block_type": ["attention", "moe"]}),
    "olmoe": Family(),
    "phimoe": Family(),
    "qwen2_moe": Family(),
    "qwen3_5_moe_text": Family(LINEAR),
    "qwen3_moe": Family(),
    "qwen3_next": Family(LINEAR),
    "solar_open": Family(),
    "zaya": Family({"num_experts_per_tok": 1}, since="5.17"),
}
SERVED = sorted(name for name, family in FAMILIES.items() if Version(transformers.__version__) >= Version(family.since))


def family_model(name: str) -> PreTrainedModel:
    """The family's tiny model; its weights are the same at every call."""
    kind = CONFIG_MAPPING[name]
    known = {annotated for base in kind.__mro__ for annotated in getattr(base, "__annotations__", {})}
    changes = FAMILIES[name].changes
    sizes = {key: value for key, value in SIZES.items() if key in known and key not in changes}
    config = kind(**sizes, **{key: value for key, value in changes.items() if value is not None})
    return build(lambda: AutoModelForCausalLM.from_config(config), seed=0)


HEAD = """# Families of transformers that are served

One drop-in serves every family whose experts transformers keeps fused; Llama 4 and DBRX have adapters. Each line below
is a tiny random model that the tests build, quantize, load, patch and unpatch, on transformers 5.17 and the newest 5.x:
logits and greedy tokens equal those of the dense model rebuilt from the same codes, files are the same byte for byte
when saved again, and unpatching gives the original back (`pytest tests/integrations/test_hf_families.py`; on 5.9 with
`scripts/oldest.sh tests/integrations`). The table is written by `python -m tests.hf_families docs/families.md` and
checked by those tests.

A gate that clamps has its limit in brackets. A family whose name is not here is found by structure all the same;
`pagedweight.patch` says in one sentence why when it cannot serve a model.

| model type | experts | gate | kept as | router weights | transformers |
| --- | --- | --- | --- | --- | --- |
"""
TAIL = """
Not served: experts that are no fused parameters (JetMoe, Switch Transformers, NLLB-MoE), zero-compute experts
(LongCat), experts whose outputs are normalised (Muse Spark), gates of another form, expert or tensor parallelism, and
models that another method has quantized (for MXFP4 and FP8 files, load with `dequantize=True`).
"""


def kept_as(experts: ExpertsModule) -> str:
    """How the model keeps its experts, in a few words."""
    if isinstance(experts.storage, DbrxStorage):
        return "w1, v1, w2 of all experts in one matrix each"
    words = ["gate_up, down" if experts.shape.gated else "up, down"]
    words += [word for word in ("transposed", "interleaved") if getattr(experts.storage, word)]
    words += ["biases"] if experts.biases() else []
    words += ["called by its block"] if experts.block is not None else []
    return ", ".join(words)


def table_row(name: str, model: PreTrainedModel, router_weights: str) -> str:
    """The family's line of the table."""
    experts = find_experts(model)[0]
    shape = experts.shape
    gate = shape.activation if shape.gated else f"{shape.activation}, no gate"
    gate += f" ({shape.limit:g})" if shape.limit else ""
    cells = (name, type(experts.module).__name__, gate, kept_as(experts), router_weights, f">= {FAMILIES[name].since}")
    return "| " + " | ".join(cells) + " |"


def router_weights_of(name: str) -> str:
    """The dtype of the routing weights that experts get in a bfloat16 model."""
    model = family_model(name).to(torch.bfloat16)
    seen: list[str] = []
    experts = find_experts(model)[0]
    if experts.block is not None:
        return "bfloat16, on the input"
    experts.module.register_forward_pre_hook(
        lambda _module, arguments: seen.append(str(arguments[2].dtype).removeprefix("torch."))
    )
    with torch.no_grad():
        model(tokens(1, 3))
    return seen[0]


def document() -> str:
    """docs/families.md as this release of transformers has it."""
    return HEAD + "".join(f"{table_row(n, family_model(n), router_weights_of(n))}\n" for n in SERVED) + TAIL


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(document(), encoding="utf-8")
