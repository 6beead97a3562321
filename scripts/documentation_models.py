"""The models and texts that documented commands name, small: python scripts/documentation_models.py FOLDER."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
from transformers import AutoTokenizer, Qwen2MoeConfig, Qwen2MoeForCausalLM

import pagedweight

ASSETS = Path(pagedweight.__file__).parent / "assets"
DENSE = ("models/Qwen1.5-MoE-A2.7B", "models/Qwen1.5-MoE-A2.7B-Chat", "Qwen/Qwen1.5-MoE-A2.7B")
PAGED = ("qwen-paged", "paged")
# Evaluating wants a window of 2,048 tokens at least half full; calibrating is slow beyond a few hundred.
TEXTS = {"c4.jsonl": 6000, "calibration.jsonl": 1600, "wikipedia.txt": 1600, "wikitext2.txt": 6000}
DOCUMENT = 400


def make(folder: Path) -> None:
    """Random dense models of one layer under every name, a quantized one, and short texts."""
    _dense(folder / DENSE[0])
    for name in DENSE[1:]:
        shutil.copytree(folder / DENSE[0], folder / name)
    pagedweight.quantize(folder / DENSE[0], folder / PAGED[0], device="cpu")
    for name in PAGED[1:]:
        shutil.copytree(folder / PAGED[0], folder / name)
    text = (ASSETS / "heldout" / "heldout.txt").read_text(encoding="utf-8")
    for name, characters in TEXTS.items():
        parts = [text[start : start + DOCUMENT] for start in range(0, characters, DOCUMENT)]
        lines = "".join(json.dumps({"text": part}) + "\n" for part in parts)
        (folder / name).write_text(lines if name.endswith("jsonl") else text[:characters], encoding="utf-8")
    asked = {"question": "How many are three and four?", "answer": "Three and four are seven.\n#### 7"}
    (folder / "gsm8k.jsonl").write_text(json.dumps(asked) + "\n", encoding="utf-8")
    read = {"context": text[:DOCUMENT], "input": "What is it about?", "answers": ["History."]}
    (folder / "qmsum.jsonl").write_text(json.dumps(read) + "\n", encoding="utf-8")


def _dense(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "tiny-qwen2-moe")
    torch.manual_seed(0)
    config = Qwen2MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=2048,
    )
    Qwen2MoeForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
