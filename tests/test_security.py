"""Nothing that a folder holds is ever run, and what the tests run on is pinned. Paths and files: tests/fuzz."""

from __future__ import annotations

import ast
import json
import re
import shutil
import tomllib
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "pagedweight"
FILES = sorted(PACKAGE.rglob("*.py"))
SHIPPED = PACKAGE / "assets" / "tiny-qwen2-moe"

# Modules that turn bytes into objects of any kind, and calls that run text.
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "yaml"}
FORBIDDEN_CALLS = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "torch.load",
    "np.load",
    "numpy.load",
    "os.system",
    "os.popen",
}
# transformers' own classes run a folder's code when they are told to trust it; told nothing, they ask a terminal.
ASKING = re.compile(r"(^|\.)(Auto\w+|model_class\(.*\))\.from_pretrained$")


def faults(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            yield from (name for name in names if name.split(".")[0] in FORBIDDEN_MODULES)
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in FORBIDDEN_CALLS or any(keyword.arg == "shell" for keyword in node.keywords):
                yield called
            if ASKING.search(called) and "trust_remote_code" not in ast.unparse(node):
                yield f"{called} without trust_remote_code=False"
            if any(
                keyword.arg == "trust_remote_code" and ast.unparse(keyword.value) != "False"
                for keyword in node.keywords
            ):
                yield f"{called} trusts"


def test_no_file_of_the_package_can_run_what_it_reads() -> None:
    found = {path.name: list(faults(ast.parse(path.read_text(encoding="utf-8")))) for path in FILES}
    assert {name: calls for name, calls in found.items() if calls} == {}


@pytest.mark.parametrize(
    "source",
    ["import pickle", "from yaml import load", "torch.load('x')", "eval(text)", "subprocess.run(command, shell=True)",
     "AutoTokenizer.from_pretrained(x)", "transformers.AutoConfig.from_pretrained(x, trust_remote_code=True)"],
)  # fmt: skip
def test_the_check_itself_can_fail(source: str) -> None:
    assert list(faults(ast.parse(source)))


EVIL = """
from pathlib import Path
Path(__file__).with_name("ran").write_text("")
import transformers
class Config(transformers.PreTrainedConfig):
    model_type = "evil"
class Model(transformers.PreTrainedModel):
    config_class = Config
class Tokenizer(transformers.PreTrainedTokenizer):
    pass
"""
MAP = {
    "AutoConfig": "evil.Config",
    "AutoModelForCausalLM": "evil.Model",
    "AutoModel": "evil.Model",
    "AutoTokenizer": ["evil.Tokenizer", None],
}


@pytest.fixture
def evil(tmp_path: Path) -> Path:
    """A folder whose config and tokenizer name code that lies in it."""
    folder = tmp_path / "model"
    shutil.copytree(SHIPPED, folder)
    (folder / "evil.py").write_text(EVIL)
    for name, changes in (
        ("config.json", {"auto_map": MAP, "model_type": "evil", "architectures": ["EvilModel"]}),
        ("tokenizer_config.json", {"auto_map": MAP, "tokenizer_class": "EvilTokenizer"}),
    ):
        path = folder / name
        path.chmod(0o644)
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def loads() -> dict[str, Callable[[Path], object]]:
    import pagedweight
    from pagedweight.calibration.pipeline import _tokenizer
    from pagedweight.saving import load_dense

    return {
        "load": pagedweight.load,
        "from_pretrained": pagedweight.from_pretrained,
        "dense": load_dense,
        "quantize": lambda folder: pagedweight.quantize(folder, folder.parent / "out"),
        "tokenizer": _tokenizer,
    }


@pytest.mark.parametrize("way", ["load", "from_pretrained", "dense", "quantize", "tokenizer"])
def test_code_that_a_folder_brings_is_not_run(evil: Path, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", reason="needs the hf extra")
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # whoever is asked says yes
    with pytest.raises((ValueError, OSError)):
        loads()[way](evil)
    assert not list(evil.parent.rglob("ran"))


@pytest.mark.parametrize("name", ["attn_implementation", "_attn_implementation", "experts_implementation"])
@pytest.mark.parametrize("way", ["load", "from_pretrained", "dense", "quantize"])
def test_code_of_the_hub_that_a_config_names_is_not_fetched(
    way: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where `kernels` is installed transformers would run it, for some organisations without being told to trust."""
    pytest.importorskip("transformers", reason="needs the hf extra")
    from transformers.integrations import hub_kernels

    asked = []
    monkeypatch.setattr(hub_kernels, "is_kernels_available", lambda *_: True)
    monkeypatch.setattr(hub_kernels, "get_kernel", lambda *arguments, **_: asked.append(arguments))
    folder = tmp_path / "model"
    shutil.copytree(SHIPPED, folder, copy_function=shutil.copyfile)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    if way in ("dense", "quantize"):
        del config["quantization_config"], config["transformers_weights"]
    for value in ("kernels-community/flash-attn2", {"text_config": "some/one:attention"}):
        for changed in (config | {name: value}, config | {"text_config": {name: value}}):
            path.write_text(json.dumps(changed))
            with pytest.raises(ValueError, match=f"config.json has .*{name}.*code of the Hub|/model has .*{name}.*Hub"):
                loads()[way](folder)
    assert not asked


def test_files_beside_a_models_weights_are_copied_from_its_folder_alone(tmp_path: Path) -> None:
    """quantize() copies a tokenizer: not what a link of that name leads to, and a folder of that name is no file."""
    from pagedweight.saving_source import _companions

    folder = tmp_path / "model"
    (folder / "LICENSES").mkdir(parents=True)
    (folder / "token.secret").write_text("")
    (folder / "tokenizer.json").symlink_to("token.secret")
    assert [path.name for path in _companions(folder)] == ["token.secret", "tokenizer.json"]
    (tmp_path / "secret").write_text("")
    (folder / "vocab.txt").symlink_to("../secret")
    with pytest.raises(ValueError, match=r"vocab\.txt is a link out of its folder"):
        _companions(folder)


@pytest.mark.parametrize("name", ["Trainer", "pipeline", "logging", "AutoTokenizer", "../x"])
def test_a_config_cannot_name_anything_but_a_model(tmp_path: Path, name: str) -> None:
    pytest.importorskip("transformers", reason="needs the hf extra")
    from transformers import AutoModelForCausalLM

    from pagedweight.saving_source import model_class

    config = json.loads((SHIPPED / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": [name]}))
    assert model_class(tmp_path) is AutoModelForCausalLM


def test_what_the_tests_run_on_is_pinned() -> None:
    """An audit of constraints-cpu.txt (docs/robustness.md) then speaks of what was tested."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = {name: wanted for name, wanted in project["optional-dependencies"].items() if name != "vllm"}
    wanted = {name_of(one) for one in (*project["dependencies"], *chain(*extras.values()))} - {"pagedweight"}
    lines = (ROOT / "constraints-cpu.txt").read_text(encoding="utf-8").splitlines()
    pinned = {name_of(line) for line in lines if re.fullmatch(r"[\w.-]+==[\w.+]+", line)}
    assert wanted - pinned == set()


def name_of(requirement: str) -> str:
    return re.match(r"[\w.-]+", requirement).group().lower().replace("_", "-")
