"""Tiny models in folders that vLLM can serve, and runs of vLLM in a process of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

import pagedweight
from tests.hf_models import VOCABULARY, DenseReference, gemma4_g16, mixtral_m8, qwen2_moe_q60

# Sizes that vLLM's own attention and experts serve on a CPU.
FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen2_moe": lambda: qwen2_moe_q60(num_attention_heads=2, num_key_value_heads=2, moe_intermediate_size=64),
    "mixtral": lambda: mixtral_m8(head_dim=32),
    "gemma4": lambda: gemma4_g16(
        head_dim=32, global_head_dim=32, hidden_size=128, intermediate_size=64, moe_intermediate_size=64
    ),
}
# Columns that fill no whole word, not even half of them on two ranks; vLLM 0.20's own experts do not serve it.
ODD = {"odd": lambda: qwen2_moe_q60(num_attention_heads=2, num_key_value_heads=2)}
HOUSE = Path(__file__).parents[3]


def write_paged(family: str, out: Path) -> Path:
    """A random model of a family, quantized into a folder."""
    return pagedweight.quantize((FAMILIES | ODD)[family](), out)


def write_dense(family: str, paged: Path, bits: int, out: Path, adapter: Path | None = None) -> Path:
    """The same model with its experts as the pages give them at a width, as an ordinary float checkpoint; an adapter's
    products are added to its weights."""
    model = DenseReference.of(FAMILIES[family](), paged).set_bits(bits)
    added = load_file(adapter / "adapter_model.safetensors") if adapter else {}
    for name, module in model.named_modules():
        sides = [added.get(f"base_model.model.{name}.lora_{side}.weight") for side in "BA"]
        if sides[0] is not None:
            module.weight.data += sides[0] @ sides[1]
    model.save_pretrained(out)
    return out


def run(model: Path, *rounds: tuple[list[list[int]], int], **llm: Any) -> dict[str, Any]:
    """One entry of serve.py's list; 16 tokens for each of three prompts where no rounds are given."""
    llm.setdefault("skip_tokenizer_init", True)
    return {"model": str(model), "llm": llm, "rounds": rounds or [(some_prompts(), 16)]}


def paged(**options: Any) -> dict[str, Any]:
    """Options of paged experts, as LLM takes them."""
    return {"additional_config": {"pagedweight": options}}


def write_adapter(model: PreTrainedModel, out: Path) -> Path:
    """A LoRA adapter for a model's queries and outputs of attention, large enough to change tokens."""
    random, weights = torch.Generator().manual_seed(0), {}
    for name, module in model.named_modules():
        if name.endswith(("q_proj", "o_proj")):
            size = {"A": (4, module.in_features), "B": (module.out_features, 4)}
            for side, shape in size.items():
                weights[f"base_model.model.{name}.lora_{side}.weight"] = torch.randn(shape, generator=random)
    out.mkdir()
    save_file(weights, out / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["q_proj", "o_proj"], "bias": "none"}
    (out / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return out


def some_prompts(count: int = 3, length: int = 20) -> list[list[int]]:
    generator = torch.Generator().manual_seed(count)
    return torch.randint(2, VOCABULARY, (count, length), generator=generator).tolist()


def serve(*runs: dict[str, Any], in_process: bool = True, timeout: int = 500) -> list[dict[str, Any]]:
    """What each run gave; vLLM's own log is shown when it fails."""
    environment = {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if in_process else "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # for functions of serve.py that run on ranks
        "VLLM_CPU_OMP_THREADS_BIND": "0|1" if any("tensor_parallel_size" in run["llm"] for run in runs) else "auto",
    }
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("serve.py"))],
        input=json.dumps(runs),
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment,
        cwd=HOUSE,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, f"vLLM failed with {done.returncode}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return json.loads(lines[-1].removeprefix("RESULT "))
