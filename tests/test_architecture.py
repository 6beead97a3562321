"""The layer contract, read from the source: who imports whom, and what no file of the package may do."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "pagedweight"
FILES = sorted(PACKAGE.rglob("*.py"))

# Imports go down this table only; the three parts of L2 never import each other.
LAYER = {
    "documents": 0,
    "layout": 0,
    "policy": 0,
    "bitplane": 1,
    "checkpoint": 1,
    "quant": 2,
    "kernels": 2,
    "runtime": 2,
    "experts": 3,
    "discovery": 4,
    "shared_experts": 4,
    "patching": 4,
    "saving": 4,
    "compiling": 4,
    "quantizing": 5,
    "integrations": 4,
    "calibration": 5,
    "demo": 6,
    "serving": 6,
    "evaluation": 6,
    "cli": 6,
    "__main__": 6,
    "": 6,  # pagedweight/__init__.py
}
APART = {"quant", "kernels", "runtime"}
ONLY = {"experts": {"layout", "kernels"}}

RUNTIME = {
    "config": 0,
    "kv": 0,
    "forks": 0,
    "frame_ids": 0,
    "frames": 0,
    "host_memory": 0,
    "interrupts": 0,
    "pages": 0,
    "transfer": 0,
    "table_view": 0,
    "table": 1,
    "observe": 1,
    "damage": 2,
    "planner": 3,
    "pager": 3,
    "controller": 4,
}
KERNELS = {
    "launch": 0,
    "call": 0,
    "reference": 0,
    "codes": 0,
    "device_order": 0,
    "checks": 0,
    "gates": 0,
    "permute": 0,
    "weighted_sum": 0,
    "copy_frames": 0,
    "routing": 1,
    "grouped": 1,
    "fused_moe": 1,
    "decode": 1,
    "prefill": 1,
    "compiling": 2,
    "regimes": 2,
    "ops": 3,
}
MUTATORS = {"append", "add", "update", "setdefault", "pop", "popitem", "clear", "extend", "insert", "remove", "discard"}
LONGEST_FILE_LINES = 300
LONGER_FILES = {"kernels.decode.ptx": 400}  # assembly text, one short piece after another
LONGEST_FUNCTION_LINES = 60
LONGEST_KERNEL_LINES = 150


def module_name(path: Path) -> str:
    """Dotted name inside the package; '' for pagedweight/__init__.py."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


MODULES = {module_name(path): path for path in FILES}


def resolve(dotted: str) -> str:
    """The module of the package that a dotted import reaches (the last parts may be names inside it)."""
    while dotted and dotted not in MODULES:
        dotted = dotted.rpartition(".")[0]
    return dotted


def type_checking_only(root: ast.Module) -> set[int]:
    """Ids of import nodes under `if TYPE_CHECKING:`, which never run."""
    guarded = (n for n in ast.walk(root) if isinstance(n, ast.If) and ast.unparse(n.test).endswith("TYPE_CHECKING"))
    return {id(inner) for block in guarded for statement in block.body for inner in ast.walk(statement)}


def imports_of(path: Path) -> Iterator[str]:
    """Modules of the package that a file imports, in-function imports included, as dotted names inside it."""
    skipped = type_checking_only(tree(path))
    package = path.relative_to(PACKAGE.parent).parent.parts
    for node in ast.walk(tree(path)):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = ".".join(package[: len(package) - node.level + 1]) + "." if node.level else ""
            base = (above + (node.module or "")).rstrip(".")
            names = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name == "pagedweight" or name.startswith("pagedweight."):
                yield resolve(name.removeprefix("pagedweight").lstrip("."))


EDGES = sorted(
    {(module, target) for module, path in MODULES.items() for target in imports_of(path) if target != module}
)


def rank(table: dict[str, int], module: str, depth: int) -> int:
    """Rank of a module by its depth-th name; a longer name such as planner_queue counts as its stem's."""
    stem = module.split(".")[depth]
    matches = [known for known in table if stem == known or (known and stem.startswith(known + "_"))]
    assert matches, f"{module} has no place in the layer contract; add {stem!r} to the table in {Path(__file__).name}"
    return table[max(matches, key=len)]


def test_every_module_has_a_layer() -> None:
    for module in MODULES:
        rank(LAYER, module, 0)


@pytest.mark.parametrize(("module", "target"), EDGES)
def test_imports_go_down(module: str, target: str) -> None:
    top, target_top = module.split(".")[0], target.split(".")[0]
    assert rank(LAYER, target, 0) <= rank(LAYER, module, 0), f"{module} imports {target}, which lies above it"
    if top != target_top:
        assert not {top, target_top} <= APART, f"{module} imports {target}: {top} and {target_top} stay apart"
        assert target_top in ONLY.get(top, {target_top}), f"{module} may import only {ONLY[top]}, not {target}"


@pytest.mark.parametrize(("package", "ranks"), [("runtime", RUNTIME), ("kernels", KERNELS)])
def test_imports_inside_a_package_go_down(package: str, ranks: dict[str, int]) -> None:
    inside = [e for e in EDGES if all(m.startswith(package + ".") for m in e)]
    for module, target in inside:
        assert rank(ranks, target, 1) <= rank(ranks, module, 1), f"{module} imports {target}, which lies above it"


def test_planner_and_pager_do_not_know_each_other() -> None:
    for module, target in EDGES:
        pair = {module.removeprefix("runtime.").split("_")[0], target.removeprefix("runtime.").split("_")[0]}
        assert pair != {"planner", "pager"}, f"{module} imports {target}; they share Transition from table_view"


def test_no_import_cycles() -> None:
    sorter = TopologicalSorter({module: [t for m, t in EDGES if m == module] for module in MODULES})
    sorter.prepare()  # raises CycleError with the cycle's modules in order


def mutated_globals(root: ast.Module) -> Iterator[str]:
    """Module-level names that some code of the module changes."""
    names = set()
    for node in root.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names |= {t.id for t in targets if isinstance(t, ast.Name)}
    for node in ast.walk(root):
        if isinstance(node, ast.Global):
            yield from node.names
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            yield from names & {ast.unparse(node.value)}
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
            yield from names & {ast.unparse(node.func.value)}


def reads_environment(root: ast.Module) -> bool:
    return any(
        isinstance(node, ast.Attribute) and ast.unparse(node) in {"os.environ", "os.getenv", "os.putenv"}
        for node in ast.walk(root)
    )


def broad_handlers(root: ast.Module) -> list[int]:
    """Line numbers of handlers that catch everything and keep it; cleaning up before a bare `raise` is fine."""
    return [
        node.lineno
        for node in ast.walk(root)
        if isinstance(node, ast.ExceptHandler)
        and ast.unparse(node.body[-1]) != "raise"
        and (node.type is None or {"Exception", "BaseException"} & {n.id for n in names_in(node.type)})
    ]


def names_in(node: ast.expr) -> Iterator[ast.Name]:
    return (inner for inner in ast.walk(node) if isinstance(inner, ast.Name))


def unpickles(root: ast.Module) -> bool:
    imports = {alias.name for node in ast.walk(root) if isinstance(node, ast.Import) for alias in node.names}
    froms = {node.module for node in ast.walk(root) if isinstance(node, ast.ImportFrom)}
    calls = {ast.unparse(node.func) for node in ast.walk(root) if isinstance(node, ast.Call)}
    return bool({"pickle", "dill", "cloudpickle", "shelve"} & (imports | froms)) or bool(
        {"torch.load", "torch.save"} & calls
    )


def uses_ptx(root: ast.Module) -> bool:
    return any(isinstance(node, ast.Attribute) and node.attr == "inline_asm_elementwise" for node in ast.walk(root))


def is_kernel(function: ast.FunctionDef) -> bool:
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


@pytest.mark.parametrize("path", FILES, ids=lambda path: module_name(path) or "pagedweight")
def test_a_file_keeps_the_house_rules(path: Path) -> None:
    root = tree(path)
    assert not list(mutated_globals(root)), "module-level state changes at run time; pass an object instead"
    assert not reads_environment(root), "reads the environment; take an argument instead"
    assert not broad_handlers(root), "catches everything; name what can be handled"
    assert not unpickles(root), "uses pickle; use safetensors and JSON"


@pytest.mark.parametrize("path", FILES, ids=lambda path: module_name(path) or "pagedweight")
def test_a_file_reads_in_a_sitting(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").count("\n")
    assert lines <= LONGER_FILES.get(module_name(path), LONGEST_FILE_LINES), f"{lines} lines; split it"
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef):
            length = node.end_lineno - node.lineno + 1
            limit = LONGEST_KERNEL_LINES if is_kernel(node) else LONGEST_FUNCTION_LINES
            assert length <= limit, f"{node.name} has {length} lines; split it"


def test_case_124_inline_ptx_stays_in_the_decode_and_prefill_kernels() -> None:
    """Every other kernel is plain Triton, so a back end without PTX never meets inline assembly there."""
    for module, path in MODULES.items():
        if not module.startswith(("kernels.decode", "kernels.prefill")):
            assert not uses_ptx(tree(path)), f"{module} uses inline assembly"


@pytest.mark.parametrize(
    ("check", "source"),
    [
        (lambda root: list(mutated_globals(root)), "CACHE = {}\ndef f(k):\n    CACHE[k] = 1"),
        (lambda root: list(mutated_globals(root)), "SEEN = []\ndef f(k):\n    SEEN.append(k)"),
        (lambda root: list(mutated_globals(root)), "N = 0\ndef f():\n    global N\n    N = 1"),
        (reads_environment, "import os\nX = os.environ.get('X')"),
        (broad_handlers, "try:\n    f()\nexcept (ValueError, Exception):\n    pass"),
        (broad_handlers, "try:\n    f()\nexcept:\n    pass"),
        (unpickles, "import torch\nx = torch.load('x')"),
        (unpickles, "from pickle import loads"),
        (uses_ptx, "y = tl.inline_asm_elementwise('mov', '=r', [])"),
    ],
)
def test_the_checks_themselves_can_fail(check, source: str) -> None:
    assert check(ast.parse(source))
