"""Times from an empty compiler cache what one model's kernels cost before it can serve: compiled side by side, then
the first calls; or, with --as-they-come, by the first calls alone.

    python bench/kernels/bench_compile.py [--shape qwen] [--codebooks lut16 fast] [--widths 2 3 4 5 6]
        [--as-they-come] [--out FILE]

Batch sizes stand for the regimes that a served model meets. One process, as a user has it; Triton's cache is a folder
of its own that is empty at the start.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

TOKENS = (1, 4, 16, 64, 512)


def first_calls(shape: str, codebooks: str, widths: tuple[int, ...], ahead: bool) -> dict[str, float]:
    """Seconds of compiling ahead and of the first call at each batch size, in order; what came before is there."""
    # Not at the top: Triton reads the cache's place when it is imported.
    import torch

    from bench.kernels.bench_decode import codebooks_of
    from bench.kernels.decode_layers import Gate, GpuLayer, routing
    from pagedweight.compiling import BATCHES
    from pagedweight.kernels.compiling import compile_kernels
    from pagedweight.kernels.ops import fused_moe

    layer = GpuLayer.random(shape, 0, planes=widths[-1])
    books = codebooks_of(codebooks, widths)
    layer.commit(widths, books, 0)

    def call_of(tokens: int) -> tuple:
        return layer.call(routing(layer, tokens, 0, torch.bfloat16), widths, books, Gate())

    seconds: dict[str, float] = {}

    def timed(name: str, call: Callable[[], object]) -> None:
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        seconds[name] = round(time.perf_counter() - start, 2)
        print(shape, codebooks, widths, name, seconds[name], "s", flush=True)

    if ahead:
        timed("ahead", lambda: compile_kernels(call_of(1), BATCHES))
    for tokens in TOKENS:
        call = call_of(tokens)
        timed(f"M={tokens}", lambda call=call: fused_moe(*call))
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="qwen")
    parser.add_argument("--codebooks", nargs="+", default=["lut16", "fast"])
    parser.add_argument("--widths", nargs="+", type=int, default=[2, 3, 4, 5, 6])
    parser.add_argument("--as-they-come", action="store_true", help="compile nothing ahead")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    widths = tuple(options.widths)
    rows = []
    for codebooks in options.codebooks:
        with tempfile.TemporaryDirectory() as cache:
            os.environ["TRITON_CACHE_DIR"] = cache
            seconds = first_calls(options.shape, codebooks, widths, not options.as_they_come)
        total = round(sum(seconds.values()), 1)
        rows.append(
            {"shape": options.shape, "codebooks": codebooks, "widths": widths, "seconds": seconds, "sum": total}
        )
        print(options.shape, codebooks, "all", total, "s", flush=True)
        if options.out:
            options.out.write_text(json.dumps(_facts() | {"rows": rows}, indent=1))


def _facts() -> dict[str, object]:
    import torch
    import triton

    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cores": os.cpu_count(),
        "command": "python " + " ".join(sys.argv),
    }


if __name__ == "__main__":
    main()
