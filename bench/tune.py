"""Settings of the decode launches to time, by suite; `bench/kernels/bench_decode.py --suite NAME` runs them on a GPU.

The table in kernels/decode/config.py was made from `sweep`, then `variants`: the best line of a case makes or
confirms a row. `chosen` times that table, in frames and in whole planes; `peers` does so beside vLLM's kernels;
`answers` checks every width and codebook on ragged shapes; `small` and `counters` are for tools that run launches
slowly.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from bench.kernels.bench_decode import LABELS, Case, codebooks_of
from bench.kernels.decode_layers import SHAPES, Gate
from pagedweight.kernels.decode.config import DecodeConfig, Hardware, ProductConfig, Workload, choose

H200 = Hardware(232448, True)
TOKENS = {"qwen": (1, 4, 16, 64), "mixtral": (1, 4, 16), "gemma": (1, 16)}


def cut(rows: int, chunks: int = 1, splits: int = 1, warps: int = 4, stages: int = 3) -> ProductConfig:
    return ProductConfig(rows, chunks, splits, warps, stages)


def around(
    tokens: int, ups: list[ProductConfig], downs: list[ProductConfig], int8: bool = False, prepared: bool = False
) -> list[DecodeConfig]:
    """Every first launch with the first of the second launches, then the other way round."""
    pairs = [(up, downs[0]) for up in ups] + [(ups[0], down) for down in downs[1:]]
    return [DecodeConfig(up, down, tokens, int8, True, prepared) for up, down in pairs]


def one_token(shape: str) -> list[DecodeConfig]:
    """Rows are few: fill operands with column chunks, share columns, or take a step a program."""
    steps = min(4, -(-SHAPES[shape][1] // 512))
    ups, downs = [cut(16, warps=2), cut(8, 2, warps=2), cut(32)], [cut(64, 1, steps), cut(32, 1, steps, 2)]
    single = [cut(8, 4), cut(4, 4, warps=2)] if shape == "qwen" else []
    settings = around(1, ups + single, downs) + around(1, ups + single[:1], downs[:1], int8=True)
    if shape == "mixtral":
        settings += around(1, ups[::2], [cut(64, splits=2), cut(64)], int8=True, prepared=True)
    return settings


def some_tokens() -> list[DecodeConfig]:
    four = around(4, [cut(16, warps=2), cut(32)], [cut(32, warps=2), cut(64)], int8=True)
    return [*four, *around(8, [cut(32)], [cut(64)], int8=True), *around(4, [cut(32)], [cut(64, splits=2)], int8=True)]


def sweep() -> list[Case]:
    cases = []
    for shape, counts in TOKENS.items():
        for label in ("3", "4", "6", "mixed"):
            for tokens in counts:
                settings = one_token(shape) if tokens == 1 else some_tokens()
                cases.append(Case(shape, tokens, label, "fast", settings))
    return cases


def _of_the_table(shape: str, tokens: int, label: str, books: str) -> Case:
    hidden, intermediate, experts, choices = SHAPES[shape]
    widths = LABELS[label]
    work = Workload(tokens, choices, experts, hidden, intermediate, widths, codebooks_of(books, widths))
    return Case(shape, tokens, label, books, [choose(work, H200)])


def chosen() -> list[Case]:
    """The table's settings, in frames and, for what frames cost, with one frame a plane."""
    cases = [
        _of_the_table(shape, tokens, label, books)
        for shape, counts in TOKENS.items()
        for books in ("fast", "lut16")
        for label in ("3", "4", "6", "mixed")
        for tokens in counts
    ]
    whole = [case._replace(frames="whole") for case in cases if case.shape == "qwen" and case.codebooks == "fast"]
    return cases + whole


def answers() -> list[Case]:
    one = [DecodeConfig(cut(16, warps=2), cut(32, warps=2), 1), DecodeConfig(cut(16, 2), cut(64), 1, False, True)]
    one8 = [
        DecodeConfig(cut(16, warps=2), cut(32, warps=2), 1, True, True),
        DecodeConfig(cut(8, 4), cut(64), 1, True, True),
        DecodeConfig(cut(16, warps=2), cut(64), 1, True, True, True),
    ]
    many = [DecodeConfig(cut(32, stages=2), cut(64, stages=2), 8, False, True)]
    many8 = [DecodeConfig(cut(32), cut(64), 8, True, True), DecodeConfig(cut(16, warps=2), cut(32, warps=2), 4, True)]
    cases = [Case("odd", 1, "all", books, one) for books in ("lut16", "fast", "cubic")]
    cases += [Case("odd", 1, "all", "fast", one8), Case("odd", 1, "all", "cubic", one[:1], dtype=torch.float16)]
    cases += [Case("odd", m, "all", books, many) for m in (3, 33) for books in ("lut16", "fast", "cubic")]
    cases += [Case("odd", m, "all", "fast", many8) for m in (2, 17, 64)]
    cases += [Case("odd", 5, "all", books, many, dtype=torch.float16) for books in ("lut16", "fast", "cubic")]
    return cases


def peers() -> list[Case]:
    """The table's settings on every shape, and lut16 at one: the rows that vLLM's stand beside."""
    framed = [case for case in chosen() if case.frames == "framed"]
    rows = [case for case in framed if case.codebooks == "fast" or (case.shape, case.tokens) == ("qwen", 16)]
    rows += [_of_the_table(shape, 64, "4", "fast") for shape in ("mixtral", "gemma")]
    few = [case for case in rows if (case.shape, case.tokens) == ("mixtral", 4)]
    # By chance four tokens meet 5.8 experts; the rows are about 5.
    rows = [case for case in rows if case not in few] + [case._replace(met=5) for case in few]
    return sorted(rows, key=lambda case: -case.tokens)


def variants() -> list[Case]:
    """What might beat the table."""

    def made(tokens: int, up: ProductConfig, down: ProductConfig, apart: bool) -> DecodeConfig:
        return DecodeConfig(up, down, tokens, True, True, False, apart)

    two, four = (cut(16, warps=2), cut(32, warps=2)), (cut(32), cut(64))
    short = [replace(c, stages=2) for c in two]
    some = [
        made(4, *two, False),
        made(4, *two, True),
        made(4, two[0], short[1], True),
        made(4, *short, True),
        made(4, cut(8, warps=1, stages=2), cut(16, warps=1, stages=2), True),
        made(4, two[0], cut(64), True),
    ]
    many = [
        made(8, *four, False),
        made(8, *four, True),
        made(8, four[0], cut(64, stages=2), True),
        made(8, *two, True),
    ]
    cases = [Case("qwen", 16, label, "fast", some) for label in ("3", "4", "6")]
    cases += [Case("qwen", 16, label, "lut16", some[:4]) for label in ("3", "4", "mixed")]
    cases += [Case("qwen", 4, label, "fast", some) for label in ("4", "6")]
    cases += [Case("qwen", 64, label, "fast", many) for label in ("4", "6")]
    cases += [Case("qwen", 64, "4", "lut16", many[:2])]
    for shape, label in (
        ("qwen", "3"),
        ("qwen", "4"),
        ("qwen", "mixed"),
        ("gemma", "3"),
        ("gemma", "4"),
        ("gemma", "mixed"),
    ):
        cases.append(Case(shape, 1, label, "fast", one_token_variants(shape)))
    cases += [Case("gemma", 16, label, "fast", some[:3]) for label in ("3", "4", "6")]
    cases += [Case("mixtral", 16, label, "fast", many[:3]) for label in ("4", "6")]
    split = [made(4, four[0], cut(64, 1, 4), apart) for apart in (False, True)]
    return cases + [Case("mixtral", 4, label, "fast", split, met=5) for label in ("3", "4")]


def one_token_variants(shape: str) -> list[DecodeConfig]:
    steps = -(-SHAPES[shape][1] // 512)
    ups = (
        [cut(8, 2, warps=2), cut(16, warps=2), cut(4, 4, warps=2)]
        if shape == "qwen"
        else [cut(8, 2, warps=2), cut(16, warps=2)]
    )
    settings = [DecodeConfig(up, cut(64, 1, steps), 1, False, True) for up in ups]
    settings += [DecodeConfig(ups[0], cut(64, 1, steps), 1, False, True, False, True)]
    settings += [DecodeConfig(ups[0], cut(32, 1, steps, 2), 1, False, True)]
    return [*settings, DecodeConfig(ups[1], cut(64, 1, steps), 1, True, True)]


def frames() -> list[Case]:
    """What frames cost: the table's settings with one frame a plane beside them, and Gemma in smaller frames."""
    framed = [case for case in chosen() if (case.label, case.codebooks, case.frames) == ("4", "fast", "framed")]
    other = [case._replace(frames="whole") for case in framed]
    return framed + other + [case._replace(frames="22528") for case in framed if case.shape == "gemma"]


def one_token_cuts() -> list[Case]:
    """One token: what the down launch may be cut into, beside two cuts of the first."""

    def made(up: ProductConfig, down: ProductConfig, int8: bool = False) -> DecodeConfig:
        return DecodeConfig(up, down, 1, int8, True)

    few, two, wide = cut(8, 2, warps=2), cut(16, warps=2), cut(16, 2)
    gemma = [made(up, cut(rows, 1, 2, rows // 16)) for up in (few, two, wide) for rows in (64, 32, 16)]
    qwen = [made(up, cut(rows, 1, 3, rows // 16)) for up in (few, two, wide, cut(8, 4)) for rows in (64, 16)]
    qwen += [made(two, cut(rows, 1, 3, rows // 16), True) for rows in (64, 16)]
    cases = [Case("gemma", 1, label, "fast", gemma) for label in ("3", "4", "6", "mixed")]
    return cases + [Case("qwen", 1, label, "fast", qwen) for label in ("3", "4", "6", "mixed")]


def large_frames() -> list[Case]:
    """One token and large experts: cuts of the down launch, in frames and with one frame a plane."""
    cuts = [
        cut(64, splits=2),
        cut(64, splits=4),
        cut(64, splits=7),
        cut(32, 1, 2, 2),
        cut(32, 1, 4, 2),
        cut(32, 1, 7, 2),
    ]
    settings = [DecodeConfig(cut(16, warps=2), down, 1, True, True, True) for down in cuts]
    case = Case("mixtral", 1, "4", "fast", settings)
    return [case, case._replace(frames="whole")]


def some_tokens_depths() -> list[Case]:
    """Several tokens at the bars that were missed: Qwen at 6 bits, Mixtral with four tokens."""

    def made(up: ProductConfig, down: ProductConfig) -> DecodeConfig:
        return DecodeConfig(up, down, 4, True, True, False, True)

    two, four = (cut(16, warps=2), cut(32, warps=2)), (cut(32), cut(64, 1, 4))
    qwen = [made(*two), made(two[0], cut(32, warps=2, stages=4)), made(replace(two[0], stages=4), two[1])]
    qwen += [made(two[0], cut(32, 1, 3, 2)), made(two[0], cut(16, warps=1)), made(cut(8, warps=1), two[1])]
    mixtral = [made(*four), made(replace(four[0], stages=4), four[1]), made(four[0], replace(four[1], stages=4))]
    mixtral += [
        made(two[0], four[1]),
        made(four[0], cut(64, 1, 8)),
        made(four[0], cut(64, 1, 2)),
        made(two[0], cut(32, 1, 4, 2)),
    ]
    return [Case("qwen", 16, "6", "fast", qwen)] + [
        Case("mixtral", 4, label, "fast", mixtral, met=met) for label in ("3", "4") for met in (5, None)
    ]


def shared_tables() -> list[Case]:
    """lut16 above 4 bits: operand rows that share a table, so that a warp's loads meet fewer of them."""

    def made(tokens: int, up: ProductConfig, down: ProductConfig) -> DecodeConfig:
        return DecodeConfig(up, down, tokens, False, True, False, True)

    settings = [made(2, cut(8, 4), cut(16, 4)), made(2, cut(16, 4, 1, 8, 2), cut(32, 4, 1, 8, 2))]
    settings += [made(4, cut(16, 2), cut(32, 2)), made(2, cut(8, 4), cut(32, 2))]
    settings += [made(2, cut(4, 4, warps=2), cut(8, 4, warps=2))]
    return [Case("qwen", 16, "6", "lut16", settings)]


def spread_tables() -> list[Case]:
    """lut16: tables in shared memory, and not; in kernels of all five widths, as a model has them, and of one."""

    def apart(case: Case) -> Case:
        return case._replace(configs=[replace(case.configs[0], spread=spread) for spread in (True, False)])

    def served(tokens: int, label: str) -> Case:
        five = _of_the_table("qwen", tokens, "2 to 6", "lut16")
        return apart(five._replace(label=label, kernel="2 to 6"))

    two = DecodeConfig(cut(16, warps=2), cut(32, warps=2), 4, False, True, False, True, spread=True)
    loads = DecodeConfig(cut(8, 4), cut(16, 4), 2, False, True, False, True)
    cases = [served(tokens, label) for tokens in (16, 4) for label in ("4", "345", "6", "5")]
    alone = [_of_the_table("qwen", 16, label, "lut16") for label in ("5", "6")]
    cases += [case._replace(configs=[*case.configs, loads]) for case in alone]
    other = ((16, "345"), (64, "6"), (1, "6"))
    cases += [apart(_of_the_table("qwen", tokens, label, "lut16")) for tokens, label in other]
    cases.append(alone[0]._replace(dtype=torch.float16))
    return [*cases, Case("odd", 17, "345", "lut16", [replace(two, int8=True)])]


def many_tokens() -> list[Case]:
    """64 tokens where Marlin is near: wider and narrower programs, other depths, sixteen tokens a program."""

    def made(tokens: int, up: ProductConfig, down: ProductConfig, int8: bool = True) -> DecodeConfig:
        return DecodeConfig(up, down, tokens, int8, True, False, True)

    two, four, eight = (cut(16, warps=2), cut(32, warps=2)), (cut(32), cut(64)), (cut(64, warps=8), cut(128, warps=8))
    settings = [made(8, *four), made(8, *two), made(8, *eight), made(8, four[0], two[1]), made(8, two[0], four[1])]
    settings += [made(8, *(replace(c, stages=stages) for c in four)) for stages in (2, 4)]
    settings += [made(8, four[0], cut(64, splits=2)), made(16, *two, int8=False)]
    return [Case(shape, 64, "4", "fast", settings) for shape in ("gemma", "mixtral", "qwen")]


def gates() -> list[Case]:
    """The table's settings with every activation, biases, experts without a gate, and the cubic codebook."""
    made = [Gate(name) for name in ("silu", "gelu_tanh", "relu2")]
    made += [Gate("clamped_silu", limit=7.0), Gate("capped_silu", limit=7.0)]
    made += [Gate("gpt_oss", limit=7.0, biases=True), Gate("silu", biases=True)]
    made += [Gate("relu2", gated=False), Gate("silu", gated=False)]
    cases = [_of_the_table("qwen", tokens, "4", "fast")._replace(gate=gate) for tokens in (1, 16) for gate in made]
    return cases + [_of_the_table("qwen", tokens, "6", "cubic") for tokens in (1, 4, 16, 64)]


def codebooks() -> list[Case]:
    """Every codebook at every width that it serves: what docs/codebooks.md sets beside quality."""
    served = {"lut16": range(2, 9), "fast": range(2, 5), "cubic from 3": range(3, 9), "affine": range(2, 9)}
    return [
        _of_the_table("qwen", tokens, str(bits), books)
        for books, widths in served.items()
        for bits in widths
        for tokens in (1, 16)
    ]


def small() -> list[Case]:
    """A few launches, for tools that run them slowly."""
    eight = DecodeConfig(cut(32), cut(64), 8, True, True, False, True)
    four = DecodeConfig(cut(16, warps=2), cut(32, warps=2), 4, True, True)
    one = DecodeConfig(cut(16, warps=2), cut(64), 1, False, True)
    return [
        Case("odd", 5, "mixed", "fast", [eight]),
        Case("odd", 5, "mixed", "lut16", [four]),
        Case("odd", 1, "mixed", "lut16", [one]),
    ]


def counters() -> list[Case]:
    """Launches of true size for a profiler."""
    chosen = [
        ("qwen", 16, "4", "fast"),
        ("qwen", 16, "6", "fast"),
        ("qwen", 16, "6", "lut16"),
        ("gemma", 1, "3", "fast"),
    ]
    return [_of_the_table(*case) for case in chosen]


def suite(name: str) -> list[Case]:
    suites = (
        sweep, chosen, answers, peers, variants, small, frames, one_token_cuts, some_tokens_depths, shared_tables,
        gates, counters, large_frames, codebooks, many_tokens, spread_tables,
    )  # fmt: skip
    return {made.__name__: made for made in suites}[name]()
