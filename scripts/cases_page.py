"""Write docs/cases.md, the faults that are looked for and the tests that look: python -m scripts.cases_page"""

from __future__ import annotations

import ast
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "cases.md"
RESULTS = ROOT / "bench" / "results"
HEAD = """# Faults that are looked for

Users of other quantized MoE models, pagers and KV caches met these faults in public. Each row is one kind; the tests
that keep it away bear its number in their name, so `pytest -k case_17` runs row 17's. Made from those names by
`python -m scripts.cases_page`. Tests marked [gpu] need a CUDA device, those marked [vllm] an environment with vLLM.
"""
KINDS = {
    "Shapes": {
        1: "A row length that fills no word or tile, at every width",
        3: "A block cut for several ranks: codes and tables cut at the same place",
        4: "Matrices of one row or of sizes that fill no word; router and shared gate are no experts",
        6: "Padding that holds ones and NaN",
        7: "Views into larger buffers: what lies beside them is neither read nor written",
        8: "A number of experts that is no power of two",
        10: "More experts than a byte counts",
        11: "Fewer tokens than one tile",
        13: "Sets of widths that cannot be served",
        15: "Codes of two experts in one word",
    },
    "Calibration and quantizing": {
        16: "Experts that calibration never reaches, equal files from equal runs",
        17: "Text that reaches hardly any expert",
        19: "An expert that got one token",
        21: "Experts that run through a grouped matmul, which no hook on a linear layer sees",
        23: "Scores that are NaN, infinite or negative",
        24: "One expert without data beside others with",
        25: "Widths that differ from expert to expert in one layer",
        27: "Clusters without members",
        29: "Text that is empty or too short",
        31: "Ranks that hold a part of the experts",
        32: "Dense weights that outlive their quantizing",
        34: "More than one layer in memory while a checkpoint is quantized",
        35: "Memory that grows with the number of samples",
        36: "Anything but routed experts being quantized",
        37: "A model or a pattern with nothing to quantize",
    },
    "Routing": {
        38: "Rows that only fill a batch, with NaN as weights",
        40: "Tokens that are NaN or infinite: neighbours and statistics",
        41: "Equal scores: of the router, of the planner",
        43: "Output that is taken from fresh memory and not written",
        44: "No token at all",
        45: "All tokens to one expert",
        46: "Routing weights that do not sum to one; the shared expert's gate",
        48: "What a replaced block returns",
    },
    "Numerics": {
        49: "bf16 in Triton's interpreter",
        51: "Ids and weights that are strided views, of every type",
        53: "Both sides of each change from one kernel to another",
        54: "Equal runs with unequal bits",
        55: "A token alone and in company",
        56: "Gate and up interleaved, biases on both blocks",
        58: "Experts that are no module of their own",
        60: "Tiles for devices with little shared memory",
    },
    "Sizes": {
        62: "Offsets beyond 32 bits",
        64: "More tokens than a grid's second axis has programs",
    },
    "CUDA graphs": {
        65: "A replay after widths and frames have changed",
        67: "Pages that move on a thread while a graph is captured",
        68: "A forward or a boundary that waits for the device",
    },
    "Pages": {
        70: "Frames used again before their copy has left",
        72: "Hundreds of moves under late forwards",
        73: "A page-locked copy read before it is complete",
        75: "Page-locked memory beyond the pages' own size",
        76: "Bytes said to be free that the driver does not see",
        78: "Host memory that does not come back",
        79: "The table and the device drifting apart",
        81: "A frame given back twice",
        83: "Tensors born in inference mode and written outside, and the reverse",
    },
    "KV cache": {
        84: "Room that was seen and is gone when it is asked for",
        86: "Weights that move while vLLM measures its memory",
        88: "A target that cannot be reached",
        89: "No KV source, or one whose blocks have another size",
        90: "Free blocks that swing around the threshold",
        92: "Freed memory that the KV pool cannot use",
        93: "Layers with a sliding window",
        95: "Importing or registering twice",
        96: "A vLLM that moved what the plugin replaces",
    },
    "Several GPUs": {
        97: "A layer on another device than the current one",
        99: "Ranks with different free memory",
        101: "A rank that fails while others wait",
        103: "Parameters on the meta device",
    },
    "Loading and saving": {
        104: "Shards that are cut, swapped or flipped",
        105: "Tensors renamed, missing or too many",
        107: "Tied embeddings",
        109: "Fields of a newer release",
        110: "Saving at mixed widths, loading in another process",
        111: "Moving or casting the whole model",
    },
    "Hugging Face": {
        113: "Adapters on experts that are never applied",
        115: "Bytes reported against bytes held",
    },
    "Threads": {
        116: "First launches from several threads",
    },
    "Environment": {
        118: "No Triton",
        119: "CPU tensors without the interpreter",
        121: "A kernel cache that cannot be written, or that four processes fill at once",
        122: "Upper bounds and exact pins",
        123: "GPUs too old for bf16",
        124: "ROCm, which knows no PTX",
    },
}


class Test(NamedTuple):
    file: str
    name: str
    marks: frozenset[str]

    def __str__(self) -> str:
        return f"`{self.file.removeprefix('tests/')}::{self.name}`" + "".join(
            f" [{mark}]" for mark in sorted(self.marks)
        )


def numbers(name: str) -> list[int]:
    """Rows that a test's name names: case_17, cases_38_and_40, TestCase79Machine."""
    found = re.search(r"cases?_?(\d+(?:_and_\d+)*)", name, re.IGNORECASE)
    return [int(number) for number in found[1].split("_and_")] if found else []


def tests() -> Iterator[Test]:
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        shared = [
            node for node in tree.body if isinstance(node, ast.Assign) and "pytestmark" in ast.unparse(node.targets)
        ]
        for node in tree.body:
            names = [target.id for target in getattr(node, "targets", []) if isinstance(target, ast.Name)]
            for name in names or [getattr(node, "name", "")]:
                if name.lower().startswith("test"):
                    marks = " ".join(map(ast.unparse, [*getattr(node, "decorator_list", []), *shared]))
                    marked = frozenset(re.findall(r"mark\.(gpu|vllm)\b", marks))
                    yield Test(path.relative_to(ROOT).as_posix(), name, marked)


def by_row() -> dict[int, list[Test]]:
    found = defaultdict(list)
    for test in tests():
        for number in numbers(test.name):
            found[number].append(test)
    return found


def noticed() -> list[str]:
    """What the records of mutants and of coverage say."""
    mutants = json.loads((RESULTS / "mutants.json").read_text(encoding="utf-8"))
    counts = mutants["summary"]
    row = [f"{100 * counts['killed_share']:.1f} %", *(counts[key] for key in ("survived", "equivalent", "gpu_only"))]
    lines = [
        "## How much the tests notice",
        "",
        "One place of pagedweight/runtime is changed at a time, the places drawn at random; what the runtime's tests",
        "miss stands in `bench/results/mutants.json` with its reason.",
        "",
        "| changed | noticed | missed | of these: change nothing | run on a CUDA device alone |",
        "| ---: | ---: | ---: | ---: | ---: |",
        f"| {' | '.join(map(str, [counts['mutants'], *row]))} |",
        "",
        f"`{mutants['command']}`, judged {mutants['judged_at']['first']}; survivors were judged again at "
        f"{' and '.join(mutants['judged_at']['survivors_again'])}, against the tests that had been written by then.",
        "",
    ]
    if (RESULTS / "coverage.json").exists():
        seen = json.loads((RESULTS / "coverage.json").read_text(encoding="utf-8"))
        lines += [
            f"Of pagedweight's lines the CPU tests reach {100 * seen['total']['share']:.1f} %, kernels interpreted;",
            "by file in `bench/results/coverage.json`.",
            "",
            f"`{seen['command']}`",
            "",
        ]
    return lines


def page() -> str:
    found, lines = by_row(), [HEAD]
    for title, kinds in KINDS.items():
        lines += [f"## {title}", "", "| row | kind | tests |", "| ---: | --- | --- |"]
        lines += [f"| {number} | {kind} | {'<br>'.join(map(str, found[number]))} |" for number, kind in kinds.items()]
        lines += [""]
    return "\n".join([*lines, *noticed()])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
