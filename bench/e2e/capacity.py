"""How many tokens of KV cache fit a budget beside the experts: filled until not one more fits, not computed.

    python -m bench.e2e.capacity --model qwen --layers 24 --gib 10.7 32 --out bench/results/h200-capacity-qwen.json

Beside bf16 experts with a DynamicCache, beside each uniform width, and with widths that follow pressure. Weights are
random (bench/e2e/drawn.py).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

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


def beside_dense(model: PreTrainedModel, budget_bytes: int, batch: int) -> dict:
    """A DynamicCache, filled until experts and its tensors would not hold one more token of every sequence."""
    experts = sum(_storage_bytes(found.module) for found in find_experts(model))
    cache, chunk, token_bytes = DynamicCache(config=model.config), MOST_CHUNK_TOKENS, 0
    room = budget_bytes - experts
    while chunk and room > 0:
        # Before the first chunk nothing says how much a token takes.
        if _cache_bytes(cache) + batch * chunk * token_bytes > room:
            chunk //= 2
            continue
        ids = torch.zeros(batch, chunk, dtype=torch.int64, device=model.device)
        with torch.no_grad():
            model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        token_bytes = _cache_bytes(cache) // (batch * cache.get_seq_length())
    tokens = batch * cache.get_seq_length() if room > 0 else 0
    return {"experts": "bf16", "tokens": tokens, "weight_bytes": experts, "kv_bytes": _cache_bytes(cache)}


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


def _cache_bytes(cache: DynamicCache) -> int:
    tensors = [tensor for layer in cache.layers if layer.is_initialized for tensor in (layer.keys, layer.values)]
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


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
    budgets = [int(gib * 2**30) for gib in options.gib]
    dense = [beside_dense(model, budget, options.batch) for budget in budgets]
    drawn = emptied(model, WIDTHS, BUFFER_BYTES if on_cuda else 0)
    results = {
        "gpu": torch.cuda.get_device_name() if on_cuda else "cpu",
        "versions": [torch.__version__, transformers.__version__],
        "command": " ".join(["python -m bench.e2e.capacity", *sys.argv[1:]]),
        "layers": options.layers,
        "batch": options.batch,
        "budgets": {str(budget): [row] for budget, row in zip(budgets, dense, strict=True)},
    }
    print(json.dumps(dense), flush=True)
    for budget in budgets:
        for row in beside_paged(drawn, budget, options.batch):
            results["budgets"][str(budget)].append(row)
            print(json.dumps({"gib": budget / 2**30, **row}), flush=True)
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
