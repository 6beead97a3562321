"""How many tokens of KV cache fit a budget beside the experts: filled until not one more fits, not computed.

    python -m bench.e2e.capacity --model qwen --layers 24 --gib 10.7 32 --out bench/results/h200-capacity-qwen.json

Beside bf16 experts (what PyTorch's allocator says that they and a token of DynamicCache hold), beside each uniform
width, and with widths that follow pressure. Weights are random (bench/e2e/drawn.py).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from transformers import DynamicCache, PreTrainedModel

from bench.e2e.decoding import Decoding
from bench.e2e.drawn import Drawn, dense_model, emptied
from pagedweight import RuntimeConfig
from pagedweight.discovery import find_experts
from pagedweight.runtime.frames import OutOfFrames

WIDTHS = (3, 4, 5, 6)
BUFFER_BYTES = 2**30
MOST_CHUNK_TOKENS = 512  # of each sequence in one forward; halved where they do not fit, down to one


class DenseBytes(NamedTuple):
    """What PyTorch's allocator says that bf16 experts and one token in a DynamicCache hold."""

    experts: int
    token: float


def dense_bytes_measured(model: PreTrainedModel, batch: int) -> DenseBytes:
    """Of a dense model on a CUDA device."""
    experts = sum(_storage_bytes(found.module) for found in find_experts(model))
    cache, before = DynamicCache(config=model.config), torch.cuda.memory_allocated()
    ids = torch.zeros(batch, MOST_CHUNK_TOKENS, dtype=torch.int64, device=model.device)
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    held = torch.cuda.memory_allocated() - before - ids.numel() * ids.itemsize
    return DenseBytes(experts, held / ids.numel())


def beside_dense(dense: DenseBytes, budget_bytes: int) -> dict:
    tokens = int(max(0, budget_bytes - dense.experts) / dense.token)
    return {"experts": "bf16", "tokens": tokens, "weight_bytes": dense.experts, "token_bytes": dense.token}


def beside_paged(drawn: Drawn, budget_bytes: int, batch: int) -> Iterator[dict]:
    """A row for each uniform width, and one for widths that follow pressure."""
    resident = drawn.resident_bytes()
    config = RuntimeConfig(budget_bytes=budget_bytes, offload_free_blocks=2 * batch, reload_free_blocks=3 * batch)
    for bits, weight_bytes in resident.items():
        if weight_bytes < budget_bytes:
            model = drawn.patched(config)
            with model.pagedweight.held_at(bits):
                yield {"experts": f"uniform {bits} bits", **filled(drawn, model, batch, budget_bytes - weight_bytes)}
    model = drawn.patched(config)
    yield {"experts": "by pressure", **filled(drawn, model, batch, budget_bytes - resident[WIDTHS[0]])}


def filled(drawn: Drawn, model: PreTrainedModel, batch: int, room_bytes: int) -> dict:
    """Tokens held when not one more of every sequence fits, the widths before and then, and the bytes then."""
    start = model.pagedweight.snapshot()
    half = room_bytes // (2 * batch * drawn.token_bytes)
    chunk = max(1, min(half, MOST_CHUNK_TOKENS))
    decoding = Decoding(model, batch, chunk)
    while chunk:
        try:
            decoding.skip(chunk)
        except OutOfFrames:
            chunk //= 2
    end = model.pagedweight.snapshot()
    tokens = batch * decoding.cache.get_seq_length()
    decoding.cache.release()
    return {
        "tokens": tokens,
        "bits": [start.mean_bits, end.mean_bits],
        "weight_bytes": end.weight_bytes,
        "kv_bytes": end.kv_bytes,
    }


def _storage_bytes(module: torch.nn.Module) -> int:
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in module.parameters()}
    return sum(storages.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="qwen")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--gib", type=float, nargs="+", required=True, help="budgets of experts and KV cache together")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    torch.backends.cuda.enable_cudnn_sdp(False)
    on_cuda = options.device == "cuda"
    model = dense_model(options.model, options.layers, options.device)
    dense = dense_bytes_measured(model, options.batch) if on_cuda else None
    drawn = emptied(model, WIDTHS, BUFFER_BYTES if on_cuda else 0)
    results = {
        "gpu": torch.cuda.get_device_name() if on_cuda else "cpu",
        "versions": [torch.__version__, transformers.__version__],
        "command": " ".join(["python -m bench.e2e.capacity", *sys.argv[1:]]),
        "layers": options.layers,
        "batch": options.batch,
        "budgets": {},
    }
    for gib in options.gib:
        budget = int(gib * 2**30)
        rows = results["budgets"][str(budget)] = [] if dense is None else [beside_dense(dense, budget)]
        for row in beside_paged(drawn, budget, options.batch):
            rows.append(row)
            print(json.dumps({"gib": gib, **row}), flush=True)
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
