"""Model folders with nothing but a config: vLLM draws the weights (load_format="dummy")."""

from __future__ import annotations

import json
from pathlib import Path

from pagedweight.integrations.vllm.frame_sizes import choose_frame_bytes_for_kv
from pagedweight.integrations.vllm.resident import row_table_bytes
from pagedweight.kernels.device_order import plane_geometry
from pagedweight.layout import Layout, MoeLayer
from pagedweight.patching_pages import layout_of

WIDTHS = (2, 3, 4, 5, 6)
CODEBOOKS = {2: "lut8", 3: "lut8", 4: "lut8", 5: "affine", 6: "affine"}
BLOCK_TOKENS = 16

QWEN = {
    "architectures": ["Qwen2MoeForCausalLM"],
    "model_type": "qwen2_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "intermediate_size": 5632,
    "shared_expert_intermediate_size": 5632,
    "norm_topk_prob": False,
    "vocab_size": 151936,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "decoder_sparse_step": 1,
    "hidden_act": "silu",
}
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
TINY = {
    **QWEN,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_experts": 8,
    "moe_intermediate_size": 64,
    "intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "vocab_size": 512,
}
MODELS = {"qwen1.5-moe": QWEN, "mixtral-8x7b": MIXTRAL, "tiny": TINY}


# What each kind of row says in its config.json. Marlin's int4 is for routed experts alone, as ours.
QUANTIZATION = {
    "bf16": None,
    "marlin": {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 128,
        "desc_act": False,
        "sym": True,
        "dynamic": {r"-:(?!.*\.experts$).*": {}},
    },
    "paged": {"quant_method": "pagedweight"},
}


def write_folder(config: dict, folder: Path, kind: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    content = {**config, "torch_dtype": "bfloat16"}
    if QUANTIZATION[kind] is not None:
        content["quantization_config"] = QUANTIZATION[kind]
    (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def experts_and_intermediate(config: dict) -> tuple[int, int]:
    """E and I of each layer."""
    experts = config.get("num_experts") or config["num_local_experts"]
    return experts, config.get("moe_intermediate_size") or config["intermediate_size"]


def layout(config: dict) -> Layout:
    experts, intermediate = experts_and_intermediate(config)
    layers = range(config["num_hidden_layers"])
    return layout_of([MoeLayer(n, experts, config["hidden_size"], intermediate) for n in layers], WIDTHS, CODEBOOKS)


def kv_token_bytes(config: dict) -> int:
    """Keys and values of one token over all layers, bf16."""
    head = config["hidden_size"] // config["num_attention_heads"]
    return config["num_hidden_layers"] * 2 * config["num_key_value_heads"] * head * 2


def expert_bytes(config: dict, row: str) -> int:
    """Device bytes that a row's routed experts hold for good: a float type's, int4's with a scale for each group, a
    width's, or the floor's and slots."""
    laid_out = layout(config)
    if row == "bf16":
        return 2 * laid_out.weights()
    if row == "marlin":
        return laid_out.weights() // 2 + 2 * laid_out.weights() // 128
    fixed, size = row != "dynamic", frame_bytes(config)
    width = int(row) if fixed else WIDTHS[0]
    frames = sum(plane_geometry(n, k, size).frames for n, k in laid_out.row_shapes())
    upper = () if fixed else tuple(b for b in WIDTHS if b > width)
    tables = row_table_bytes(laid_out, (width,)).sum() + row_table_bytes(laid_out, upper).sum()
    return frames * width * size + int(tables)


def frame_bytes(config: dict) -> int:
    """The same for every row, so that all run the same kernels."""
    piece_bytes = kv_token_bytes(config) * BLOCK_TOKENS // config["num_hidden_layers"] // 2
    return choose_frame_bytes_for_kv(layout(config).row_shapes(), piece_bytes)


def versions() -> dict[str, str]:
    """What a figure was measured on."""
    import torch
    from vllm.version import __version__

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {"gpu": gpu, "vllm": __version__, "torch": torch.__version__}
