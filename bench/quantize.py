"""How long the quantizer takes, and how much memory: layers of true shapes on a device, or a whole folder.

    python -m bench.quantize --out results/h200-quantize.json                 layers drawn on the device
    python -m bench.quantize --folder MODEL --level fast --out result.json    a folder on this machine, end to end
    python -m bench.quantize --drawn-folder 3 --out result.json               a folder of 3 such layers, written first

A layer's time is from its weights on the device to its pages and damage on the host. What is not measured in full is
extrapolated from the layers that were, and said to be. Every row has its memory over time, which
`python -m bench.quantize_figure` draws.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import Qwen2MoeConfig

import pagedweight
from bench.memory_curve import MemoryCurve
from bench.quality_parts import command
from pagedweight.bitplane import dequantize
from pagedweight.calibration.statistics import MOMENT_COLUMNS, LayerSums, Statistics
from pagedweight.checkpoint import Checkpoint
from pagedweight.layout import MoeLayer, Projection
from pagedweight.patching_quantize import quantized_blocks
from pagedweight.quant.levels import LEVELS, Settings

WIDTHS = (2, 3, 4, 5, 6)
# Of the weights' energy, at 6 bits; best moves codes for 2 to 4 bits and gives some of 6 up.
LARGEST_ERROR = {"fast": 0.003, "balanced": 0.003, "best": 0.01}
# Shape of a layer, number of layers, (level, limit in seconds for all layers or for one).
MODELS = {
    "Qwen1.5-MoE": (MoeLayer(0, 60, 2048, 1408), 24, {"fast": 180.0, "balanced": 360.0}),
    "Mixtral-8x7B": (MoeLayer(0, 8, 4096, 14336), 1, {"best": 60.0}),
}


def drawn_weights(shape: MoeLayer, device: str, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator(device).manual_seed(seed)
    return tuple(
        0.02 * torch.randn(shape.experts, *shape.shape(p), generator=generator, device=device, dtype=torch.bfloat16)
        for p in Projection
    )


def drawn_statistics(shape: MoeLayer, device: str) -> Statistics:
    """Sums as calibration would leave them: correlated inputs of uneven size, every expert reached."""
    generator = torch.Generator(device).manual_seed(0)
    layer = LayerSums.zeros(shape, torch.device(device), MOMENT_COLUMNS)
    layer.mass.fill_(100.0)
    layer.counts.fill_(1000)
    for block in layer.blocks:
        block.columns.copy_(torch.rand(block.columns.shape, generator=generator, device=device) + 0.1)
        block.rows.copy_(torch.rand(block.rows.shape, generator=generator, device=device) + 0.1)
        block.total.fill_(1.0)
        for moment in block.moment if block.moment is not None else ():
            columns = len(moment)
            inputs = torch.randn(512, columns, generator=generator, device=device)
            torch.addmm(torch.eye(columns, device=device), inputs.T, inputs, beta=100.0, out=moment)
    return Statistics((layer,), tokens=10_000, sequences=20)


def measure_layers(shape: MoeLayer, layers: int, level: str, device: str, budget_s: float) -> dict[str, object]:
    """Quantize layers until all are done or the time is up; the first one, with its start-up costs, counts too."""
    settings = Settings(level, WIDTHS, dict.fromkeys(WIDTHS, "lut16"))
    reset_peak(device)
    with MemoryCurve() as curve:
        statistics = None if LEVELS[level] is None else drawn_statistics(shape, device)
        stakes = None if statistics is None else statistics.importance(0)
        weights, seconds, done = None, 0.0, 0
        while done < layers and (done == 0 or seconds * (done + 1) / done < budget_s):
            del weights
            weights = drawn_weights(shape, device, done)
            began = clock(device)
            made = list(quantized_blocks(shape, weights, settings, stakes=stakes))
            seconds += clock(device) - began
            done += 1
    check(weights, made, level)
    return {
        "level": level,
        "layers": layers,
        "measured_layers": done,
        "seconds": seconds,
        "seconds_of_all": seconds * layers / done,
        "device_peak_bytes": peak_bytes(device),
        "layer_bytes": layer_bytes(shape),
        "memory": curve.thinned(),
    }


def layer_bytes(shape: MoeLayer) -> int:
    """Of a layer's expert weights in bf16."""
    return 2 * sum(shape.experts * n * k for n, k in map(shape.shape, Projection))


def check(weights: tuple[torch.Tensor, torch.Tensor], made: list, level: str) -> None:
    """The last layer's errors fall with every bit, from about an eighth of a Gaussian's energy at 2 bits."""
    for one in made[:4]:
        weight = weights[one.block.projection][one.block.expert].float().cpu()
        errors = [
            float((weight - dequantize(one.packed, bits)).square().mean() / weight.square().mean()) for bits in WIDTHS
        ]
        assert errors == sorted(errors, reverse=True), errors
        assert errors[0] < 0.2, errors
        assert errors[-1] < LARGEST_ERROR[level], errors


def reset_peak(device: str) -> None:
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_bytes(device: str) -> int | None:
    """Of tensors on a GPU."""
    return torch.cuda.max_memory_allocated() if device == "cuda" else None


def clock(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def measure_folder(folder: Path, level: str, calibration: Path | None, device: str) -> dict[str, object]:
    """A folder end to end: read layer by layer, quantized, written and checked."""
    reset_peak(device)
    with tempfile.TemporaryDirectory(dir=folder.parent) as out, MemoryCurve() as curve:
        began = time.perf_counter()
        made = pagedweight.quantize(folder, Path(out) / "out", level=level, calibration=calibration, device=device)
        seconds = time.perf_counter() - began
        layers = Checkpoint.open(made).layout.moe_layers
    return {
        "folder": folder.name,
        "level": level,
        "layers": len(layers),
        "seconds": seconds,
        "threads": torch.get_num_threads(),
        "device_peak_bytes": peak_bytes(device),
        "layer_bytes": max(map(layer_bytes, layers)),
        "memory": curve.thinned(),
    }


def draw_folder(folder: Path, layers: int, shape: MoeLayer, device: str) -> Path:
    """A model of drawn experts as transformers would save it, one file a layer; nothing but experts is in it."""
    folder.mkdir()
    config = Qwen2MoeConfig(
        num_hidden_layers=layers,
        hidden_size=shape.hidden,
        moe_intermediate_size=shape.intermediate,
        num_experts=shape.experts,
        architectures=["Qwen2MoeForCausalLM"],
    )
    config.save_pretrained(folder)
    files = {}
    for layer in range(layers):
        gate_up, down = (weight.cpu() for weight in drawn_weights(shape, device, layer))
        tensors = {}
        for expert in range(shape.experts):
            prefix = f"model.layers.{layer}.mlp.experts.{expert}"
            tensors[f"{prefix}.gate_proj.weight"] = gate_up[expert, : shape.intermediate].clone()
            tensors[f"{prefix}.up_proj.weight"] = gate_up[expert, shape.intermediate :].clone()
            tensors[f"{prefix}.down_proj.weight"] = down[expert].clone()
        name = f"model-{layer + 1:05d}-of-{layers:05d}.safetensors"
        save_file(tensors, folder / name, metadata={"format": "pt"})
        files |= dict.fromkeys(tensors, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return folder


def machine(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file of the results")
    parser.add_argument("--folder", type=Path, help="quantize this model instead of drawn layers")
    parser.add_argument("--level", choices=list(LEVELS), default="fast")
    parser.add_argument("--calibration", type=Path, help="text for the folder's levels above fast")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--budget", type=float, default=30.0, metavar="SECONDS", help="for each model and level")
    parser.add_argument("--shrink", type=int, default=1, help="divide every size by this, to try the bench itself")
    parser.add_argument(
        "--drawn-folder", type=int, metavar="LAYERS", help="write such a Qwen1.5-MoE folder and take it"
    )
    parser.add_argument("--experts", type=int, help="measure so many of a layer's experts and scale its time to all")
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS), metavar="MODEL")
    arguments = parser.parse_args()
    rows: list[dict[str, object]] = []
    shapes = {name: (shrunk(full, arguments.shrink), *rest) for name, (full, *rest) in MODELS.items()}
    if arguments.folder:
        rows.append(measure_folder(arguments.folder, arguments.level, arguments.calibration, arguments.device))
    elif arguments.drawn_folder:
        with tempfile.TemporaryDirectory() as place:
            shape = shapes["Qwen1.5-MoE"][0]
            drawn = draw_folder(Path(place) / "drawn", arguments.drawn_folder, shape, arguments.device)
            rows.append(measure_folder(drawn, arguments.level, None, arguments.device))
    for row in rows:
        print(folder_summary(row), flush=True)
    for name in () if rows else arguments.models:
        shape, layers, limits = shapes[name]
        for level, limit_s in limits.items():
            part = replace(shape, experts=min(arguments.experts or shape.experts, shape.experts))
            row = measure_layers(part, layers, level, arguments.device, arguments.budget)
            row["seconds_of_all"] *= shape.experts / part.experts
            rows.append({"model": name, "shape": str(part), "experts": shape.experts, "limit_s": limit_s, **row})
            print(summary(rows[-1]), flush=True)
            write(arguments.out, arguments.device, rows)
    write(arguments.out, arguments.device, rows)


def shrunk(full: MoeLayer, by: int) -> MoeLayer:
    return MoeLayer(0, max(1, full.experts // by), full.hidden // by, full.intermediate // by)


def folder_summary(row: dict[str, object]) -> str:
    layer = row["layer_bytes"]
    peaks = {where: max(row["memory"][f"{where}_bytes"], default=0) / layer for where in ("device", "host")}
    return (
        f"{row['folder']}: {row['level']}, {row['layers']} layers of {layer / 2**20:.1f} MiB, {row['seconds']:.1f} s; "
        f"at most {peaks['device']:.2f} layers on the device, {peaks['host']:.2f} on the host"
    )


def summary(row: dict[str, object]) -> str:
    whole = row["measured_layers"] == row["layers"] and f"experts={row['experts']}," in row["shape"]
    how = "measured" if whole else f"extrapolated from {row['measured_layers']} layers of {row['shape']}"
    peak = ""
    if row["device_peak_bytes"] is not None:
        times = row["device_peak_bytes"] / row["layer_bytes"]
        peak = f", device peak {times:.2f} x a layer's {row['layer_bytes'] / 2**30:.2f} GiB"
    return (
        f"{row['model']:14} {row['level']:9} {row['layers']} layers {row['seconds_of_all']:.1f} s ({how}; limit "
        f"{row['limit_s']:.0f} s){peak}"
    )


def write(path: Path, device: str, rows: list[dict[str, object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {
        "machine": machine(device),
        "torch": torch.__version__,
        "command": command("bench.quantize"),
        "rows": rows,
    }
    path.write_text(json.dumps(document) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
