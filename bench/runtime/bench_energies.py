"""What column energies would cost at run time: one more launch a MoE layer, beside the decode steps they would ride on.

    python -m bench.runtime.bench_energies --steps bench/results/h200-throughput-qwen-lut16.json --out result.json

Energy of a linear-block at a width: sum_t r_t^2 sum_j C_j x_tj^2, C_j the loss-weighted squared error of column j there
(`pagedweight.calibration.sequences`). The kernels keep no such sum: this is a launch of its own that reads each routed
pair's two inputs and its experts' C, in fp16, and adds a number for each width. Inputs and C are drawn and in no L2.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from bench.quality_parts import command, machine
from bench.timing import median_ms
from pagedweight.layout import MoeLayer, Projection

WIDTHS = 5
BLOCK = 512
# Shape, MoE layers and experts of a token.
MODELS = {"qwen": (MoeLayer(0, 60, 2048, 1408), 24, 4), "mixtral": (MoeLayer(0, 8, 4096, 14336), 32, 2)}


class Drawn(NamedTuple):
    """A layer's inputs and sums. x: (T, H), inner: (T * A, I), bf16. ids, weights: (T, A). errors: (E, W, K) fp16 of
    each projection. energies: fp32 (E, 2, W), added to."""

    x: torch.Tensor
    inner: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    errors: tuple[torch.Tensor, torch.Tensor]
    energies: torch.Tensor


@triton.jit
def _column_energies_kernel(
    x_ptr, inner_ptr, ids_ptr, weights_ptr, gate_up_errors_ptr, down_errors_ptr, energies_ptr,
    hidden, intermediate, per_token, WIDTHS: tl.constexpr, WIDTHS2: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK columns of one routed pair's input to one projection, at every width.
    Grid (pairs, blocks, 2)."""
    pair, projection = tl.program_id(0), tl.program_id(2)
    expert, weight = tl.load(ids_ptr + pair), tl.load(weights_ptr + pair)
    column, width = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, WIDTHS2)
    if projection == 0:
        columns, inputs, errors = hidden, x_ptr + (pair // per_token) * hidden, gate_up_errors_ptr
    else:
        columns, inputs, errors = intermediate, inner_ptr + pair * intermediate, down_errors_ptr
    inside = column < columns
    x = weight * tl.load(inputs + column, mask=inside, other=0.0).to(tl.float32)
    place = (expert * WIDTHS + width[:, None]) * columns + column[None, :]
    error = tl.load(errors + place, mask=(width < WIDTHS)[:, None] & inside[None, :], other=0.0).to(tl.float32)
    energy = tl.sum(error * (x * x)[None, :], 1)
    tl.atomic_add(energies_ptr + (expert * 2 + projection) * WIDTHS + width, energy, mask=width < WIDTHS)


def launch_column_energies(drawn: Drawn) -> None:
    hidden, intermediate = drawn.x.shape[1], drawn.inner.shape[1]
    grid = (drawn.ids.numel(), triton.cdiv(max(hidden, intermediate), BLOCK), len(Projection))
    _column_energies_kernel[grid](
        drawn.x, drawn.inner, drawn.ids, drawn.weights, *drawn.errors, drawn.energies,
        hidden, intermediate, drawn.ids.shape[1],
        WIDTHS=WIDTHS, WIDTHS2=triton.next_power_of_2(WIDTHS), BLOCK=BLOCK,
    )  # fmt: skip


def column_energies_reference(drawn: Drawn) -> torch.Tensor:
    """What a launch adds, (E, 2, W)."""
    expert, weight = drawn.ids.reshape(-1), drawn.weights.reshape(-1, 1)
    inputs = drawn.x.repeat_interleave(drawn.ids.shape[1], 0), drawn.inner
    added = torch.zeros_like(drawn.energies)
    for projection, (x, errors) in enumerate(zip(inputs, drawn.errors, strict=True)):
        squares = (weight * x.float()).square().unsqueeze(-1)
        added[:, projection].index_add_(0, expert, (errors[expert].float() @ squares).squeeze(-1))
    return added


def draw(shape: MoeLayer, tokens: int, per_token: int, device: str, seed: int) -> Drawn:
    generator = torch.Generator(device).manual_seed(seed)

    def uniform(*size: int) -> torch.Tensor:
        return torch.rand(*size, generator=generator, device=device)

    return Drawn(
        uniform(tokens, shape.hidden).bfloat16(),
        uniform(tokens * per_token, shape.intermediate).bfloat16(),
        uniform(tokens, shape.experts).topk(per_token).indices,
        uniform(tokens, per_token),
        tuple(uniform(shape.experts, WIDTHS, shape.shape(p)[1]).half() for p in Projection),
        torch.zeros(shape.experts, len(Projection), WIDTHS, device=device),
    )


def measure(shape: MoeLayer, layers: int, per_token: int, tokens: int, device: str) -> float:
    """Milliseconds of a launch in every layer, one after another, after the first layer's has been checked."""
    model = [draw(shape, tokens, per_token, device, seed) for seed in range(layers)]
    launch_column_energies(model[0])
    torch.testing.assert_close(model[0].energies, column_energies_reference(model[0]), rtol=1e-3, atol=1e-3)
    return median_ms(lambda: [launch_column_energies(own) for own in model], torch.device(device))


def step_ms(path: Path) -> dict[int, float]:
    """By batch, a decode step at uniform widths, from `bench.e2e.throughput`; the shortest where there are several."""
    steps: dict[int, float] = {}
    for row in json.loads(path.read_text(encoding="utf-8"))["paged"]:
        if row["experts"] == "uniform":
            own = 1e3 * row["batch"] / row["tokens_per_second"]
            steps[row["batch"]] = min(own, steps.get(row["batch"], own))
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=list(MODELS), default="qwen")
    parser.add_argument("--steps", type=Path, required=True, help="JSON of bench.e2e.throughput for that model")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shrink", type=int, default=1, help="divide sizes by this, to try the bench itself")
    arguments = parser.parse_args()
    full, layers, per_token = MODELS[arguments.model]
    by = arguments.shrink
    shape = MoeLayer(0, full.experts, full.hidden // by, full.intermediate // by)
    tables = 2 * layers * WIDTHS * shape.experts * (shape.hidden + shape.intermediate)
    rows = []
    for batch, step in sorted(step_ms(arguments.steps).items()):
        own = measure(shape, max(1, layers // by), per_token, batch, arguments.device)
        rows.append({"batch": batch, "energies_ms": own, "step_ms": step, "share_of_step": own / step})
        print(f"{batch} sequences: {1e3 * own:.1f} us of a step of {step:.3f} ms, {100 * own / step:.2f} %", flush=True)
    result = {"machine": machine(arguments.device), "command": command("bench.runtime.bench_energies")}
    result |= {"model": arguments.model, "layers": layers, "table_bytes": tables, "rows": rows}
    arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
