"""A checkpoint larger than its quantizer's memory: peak host memory, a kill, and the run that goes on from it.

    python bench/big_checkpoint.py --work DIR --out results/h200-big-checkpoint.json

Writes a synthetic Mixtral-8x7B of fewer layers, sharded as on the Hub, quantizes the folder in a process of its own
that is killed half-way, and lets a second one finish. Memory is the process's own pages, sampled from outside, above
what it held once a toy model had gone the same way. 32 layers, Mixtral's 46.7 billion parameters, are extrapolated from
the time of a layer: no more than one is in memory at any time, so the peak stays.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import MixtralConfig

import pagedweight
from pagedweight.bitplane import dequantize
from pagedweight.checkpoint import Checkpoint
from pagedweight.layout import BlockId, Projection
from pagedweight.saving_folder import DenseFolder, Piece

LAYERS_OF_47B = 32
SHARD_BYTES = 5 << 30
SAMPLE_S = 0.01
TOY = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}


def mixtral(layers: int, shrink: int) -> MixtralConfig:
    sizes = {"hidden_size": 4096 // shrink, "intermediate_size": 14336 // shrink, "vocab_size": 32000 // shrink}
    return MixtralConfig(num_hidden_layers=layers, architectures=["MixtralForCausalLM"], dtype="bfloat16", **sizes)


def shapes(config: MixtralConfig) -> dict[str, tuple[int, ...]]:
    """Tensors of the files, by the names that Mixtral has on the Hub."""
    hidden, inner, head = config.hidden_size, config.intermediate_size, config.hidden_size // config.num_attention_heads
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_hidden_layers):
        at = f"model.layers.{layer}"
        found |= {f"{at}.{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
        for name, heads in (("q", config.num_attention_heads), ("k", config.num_key_value_heads)):
            found[f"{at}.self_attn.{name}_proj.weight"] = (heads * head, hidden)
        found[f"{at}.self_attn.v_proj.weight"] = found[f"{at}.self_attn.k_proj.weight"]
        found[f"{at}.self_attn.o_proj.weight"] = (hidden, hidden)
        found[f"{at}.block_sparse_moe.gate.weight"] = (config.num_local_experts, hidden)
        for expert in range(config.num_local_experts):
            own = f"{at}.block_sparse_moe.experts.{expert}"
            found |= {f"{own}.w1.weight": (inner, hidden), f"{own}.w2.weight": (hidden, inner)}
            found[f"{own}.w3.weight"] = (inner, hidden)
    return found | {"model.norm.weight": (hidden,), "lm_head.weight": (config.vocab_size, hidden)}


def synthesize(folder: Path, config: MixtralConfig, device: str, shard_bytes: int) -> int:
    """Drawn weights in bfloat16; returns the bytes of all files."""
    folder.mkdir(parents=True)
    config.to_json_file(folder / "config.json")
    generator = torch.Generator(device).manual_seed(0)
    shard: dict[str, torch.Tensor] = {}
    written: list[list[str]] = []

    def flush() -> None:
        written.append(list(shard))
        save_file(shard, folder / f"part-{len(written)}.safetensors", {"format": "pt"})
        shard.clear()

    for name, shape in shapes(config).items():
        drawn = torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
        if sum(tensor.nbytes for tensor in shard.values()) + drawn.nbytes > shard_bytes:
            flush()
        shard[name] = drawn.mul_(0.02).cpu()
    flush()
    files = [f"model-{i + 1:05d}-of-{len(written):05d}.safetensors" for i in range(len(written))]
    for i, name in enumerate(files):
        (folder / f"part-{i + 1}.safetensors").rename(folder / name)
    places = {tensor: file for file, tensors in zip(files, written, strict=True) for tensor in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return sum((folder / name).stat().st_size for name in files)


def quantize_and_tell(toy: Path, folder: Path, out: Path, device: str) -> None:
    """In a process of its own: a line when the toy is done, one for every linear-block, and one at the end."""
    pagedweight.quantize(toy, out.with_name(f"{out.name}-toy"), device=device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    print(json.dumps({"ready": time.time()}), flush=True)

    def tell(step: str, done: int, total: int) -> None:
        print(json.dumps({"done": done, "total": total, "at": time.time()}), flush=True)

    pagedweight.quantize(folder, out, device=device, progress=tell)
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    print(json.dumps({"device_peak_bytes": peak}), flush=True)


class Sampler(threading.Thread):
    """The most private memory that a process has held since `start_anew`."""

    def __init__(self, process: int) -> None:
        super().__init__(daemon=True)
        self._statm = Path(f"/proc/{process}/statm")
        self.before_bytes = self.peak_bytes = 0

    def held_bytes(self) -> int:
        """Resident pages less those that are files' or shared."""
        _, resident, shared, *_ = map(int, self._statm.read_text().split())
        return (resident - shared) * os.sysconf("SC_PAGE_SIZE")

    def start_anew(self) -> None:
        self.before_bytes = self.peak_bytes = self.held_bytes()

    def run(self) -> None:
        try:
            while True:
                self.peak_bytes = max(self.peak_bytes, self.held_bytes())
                time.sleep(SAMPLE_S)
        except (OSError, ValueError):  # the process has ended
            return


def run_once(arguments: list[str], kill_at: float) -> dict[str, float | int | bool]:
    """One quantizing process, killed once so large a part of the linear-blocks is written."""
    # The allocator gives freed memory back at once, so that the peak is what was in use.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    process = subprocess.Popen(
        [sys.executable, __file__, *arguments], stdout=subprocess.PIPE, text=True, env=environment
    )
    sampler = Sampler(process.pid)
    began = 0.0
    steps: list[tuple[int, float]] = []
    row: dict[str, float | int | bool] = {"killed": False}
    for line in process.stdout:
        told = json.loads(line)
        if "ready" in told:
            began = told["ready"]
            sampler.start_anew()
            sampler.start()
        elif "done" in told:
            steps.append((told["done"], told["at"] - began))
            row["total_blocks"] = told["total"]
            if told["done"] >= kill_at * told["total"]:
                process.send_signal(signal.SIGKILL)
                row["killed"] = True
                break
        else:
            row |= told
    if process.wait() != (-signal.SIGKILL if row["killed"] else 0):
        raise RuntimeError(f"the quantizing process ended with {process.returncode}")
    first, last = steps[0], steps[-1]
    return row | {
        "first_block": first[0],
        "last_block": last[0],
        "seconds": last[1],
        "seconds_per_block": (last[1] - first[1]) / max(1, last[0] - first[0]),
        "seconds_left_told_half_way": told_half_way(steps, row["total_blocks"]),
        "seconds_left_half_way": last[1] - steps[len(steps) // 2][1],
        "host_before_bytes": sampler.before_bytes,
        "host_peak_above_bytes": sampler.peak_bytes - sampler.before_bytes,
    }


def told_half_way(steps: list[tuple[int, float]], total: int) -> float:
    """Time left as a progress bar reckons it at the middle step: from the pace so far."""
    (first, began), (done, at) = steps[0], steps[len(steps) // 2]
    return (total - done) * (at - began) / max(1, done - first)


def check(folder: Path, out: Path, config: MixtralConfig) -> float:
    """Every checksum, and the error of some experts at the parent width against the weights they were made of."""
    checkpoint = Checkpoint.open(out)
    checkpoint.verify()
    source = DenseFolder(folder)
    worst = 0.0
    for layer in range(config.num_hidden_layers):
        for expert in (0, config.num_local_experts - 1):
            name = f"model.layers.{layer}.block_sparse_moe.experts.{expert}.w2.weight"
            weight = torch.empty(source.tensors[name].shape, dtype=torch.bfloat16)
            source.read(weight, [Piece(name, None, 0)])
            packed = checkpoint.block(BlockId(layer, expert, Projection.DOWN))
            rows = slice(0, 64)
            error = dequantize(packed, 6)[rows] - weight[rows].float()
            worst = max(worst, float(error.square().mean() / weight[rows].float().square().mean()))
    assert worst < 0.003, worst
    return worst


def digests(out: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted((out / "pagedweight").glob("pages-*.safetensors"))
    }


def measure(arguments: argparse.Namespace) -> dict[str, object]:
    config = mixtral(arguments.layers, arguments.shrink)
    work: Path = arguments.work
    began = time.perf_counter()
    checkpoint_bytes = synthesize(work / "dense", config, arguments.device, arguments.shard_bytes)
    print(f"{checkpoint_bytes / 1e9:.2f} GB written in {time.perf_counter() - began:.1f} s", flush=True)
    synthesize(work / "toy", MixtralConfig(num_hidden_layers=1, vocab_size=64, **TOY), arguments.device, SHARD_BYTES)
    (work / "toy" / "config.json").write_text(
        MixtralConfig(num_hidden_layers=1, vocab_size=64, architectures=["MixtralForCausalLM"], **TOY).to_json_string()
    )
    child = ["--child", str(work), "--device", arguments.device]
    killed = run_once(child, arguments.kill_at)
    print("killed", killed, flush=True)
    kept = digests(work / "out")
    resumed = run_once(child, 2.0)
    print("resumed", resumed, flush=True)
    again = digests(work / "out")
    layer_bytes = 2 * 3 * config.num_local_experts * config.hidden_size * config.intermediate_size
    layer_s = resumed["seconds_per_block"] * 2 * config.num_local_experts
    return {
        "checkpoint_bytes": checkpoint_bytes,
        "layers": config.num_hidden_layers,
        "layer_bytes": layer_bytes,
        "killed": killed,
        "resumed": resumed,
        "files_kept_as_they_were": all(again[name] == digest for name, digest in kept.items()),
        "files_at_the_kill": len(kept),
        "pages_bytes": sum(path.stat().st_size for path in (work / "out" / "pagedweight").iterdir()),
        "worst_relative_error_at_6_bits": check(work / "dense", work / "out", config),
        "seconds_per_layer": layer_s,
        "extrapolated_seconds_of_47B": layer_s * LAYERS_OF_47B,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, help="an empty folder on a disk with room for one and a half checkpoints")
    parser.add_argument("--out", type=Path, help="JSON file of the results")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--kill-at", type=float, default=0.4, help="part of the linear-blocks, from 0 to 1")
    parser.add_argument("--shard-bytes", type=int, default=SHARD_BYTES)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shrink", type=int, default=1, help="divide every size by this, to try the bench itself")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        work = arguments.child
        quantize_and_tell(work / "toy", work / "dense", work / "out", arguments.device)
        return
    row = measure(arguments)
    over = max(row["killed"]["host_peak_above_bytes"], row["resumed"]["host_peak_above_bytes"]) - row["layer_bytes"]
    print(
        f"{row['checkpoint_bytes'] / 1e9:.2f} GB, host peak a layer {over / 2**20:+.0f} MiB, "
        f"{row['seconds_per_layer']:.1f} s a layer, 47 B in {row['extrapolated_seconds_of_47B'] / 60:.1f} min "
        "(extrapolated)",
        flush=True,
    )
    machine = torch.cuda.get_device_name() if arguments.device == "cuda" else "CPU"
    document = {"machine": machine, "torch": torch.__version__, "command": f"python {shlex.join(sys.argv)}", **row}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    shutil.rmtree(arguments.work)


if __name__ == "__main__":
    main()
