"""What paging the shared experts too saves in bytes and costs in KL, at uniform widths.

    python -m bench.e2e.shared_experts MODEL --text WikiText-2=test.txt --text C4=c4.jsonl \\
        --out bench/results/shared-experts-<model>.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedModel

import pagedweight
from pagedweight.calibration.divergence import Reference, diverge, take_reference
from pagedweight.evaluation.items import Items, Size, read_items
from pagedweight.evaluation.record import command, machine, versions
from pagedweight.saving import load_dense
from pagedweight.shared_experts import fold_shared_experts

WIDTHS = (3, 4, 5, 6)


def items_of(folder: Path, texts: Mapping[str, Path], size: Size) -> dict[str, Items]:
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def encode(text: str) -> Sequence[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    return {name: read_items(path, encode, size, tokenizer.eos_token_id) for name, path in texts.items()}


def rows_of(
    model: PreTrainedModel, kind: str, items: Mapping[str, Items], references: Mapping[str, Reference]
) -> list[dict]:
    """Patched in memory, at each width: KL of every item, and bytes of all its weights."""
    runtime = pagedweight.patch(model).pagedweight
    rest = sum(tensor.nbytes for tensor in model.state_dict().values())
    rows = []
    for width in WIDTHS:
        runtime.set_bits(width)
        kl = {name: diverge(model, references[name], own.scored).kl.tolist() for name, own in items.items()}
        held = runtime.snapshot().weight_bytes
        rows.append({"paged": kind, "width": width, "paged_bytes": held, "rest_bytes": rest, "kl": kl})
        print(kind, width, held, rest, {name: sum(values) / len(values) for name, values in kl.items()}, flush=True)
    runtime.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", action="append", required=True, metavar="NAME=FILE")
    parser.add_argument("--count", type=int, default=16, help="windows of each text")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    texts = {name: Path(path) for name, _, path in (one.partition("=") for one in options.text)}
    items = items_of(options.model, texts, Size(options.length, options.count))
    place = {"device_map": options.device, "dtype": torch.float32}
    model = load_dense(options.model, **place).eval()
    references = {name: take_reference(model, own.windows) for name, own in items.items()}
    rows = rows_of(model, "routed", items, references)
    model = load_dense(options.model, **place).eval()
    fold_shared_experts(model)
    rows += rows_of(model, "routed and shared", items, references)
    facts = {"machine": machine(options.device), "versions": versions()}
    facts |= {"model": options.model.name, "command": command("python -m bench.e2e.shared_experts")}
    options.out.write_text(json.dumps({**facts, "rows": rows}) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
