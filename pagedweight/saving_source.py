"""Where quantize() takes a model from: one in memory, or a folder that is read layer by layer."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from pagedweight.checkpoint_header import leaves_folder
from pagedweight.discovery import find_experts
from pagedweight.discovery_experts import ExpertsModule
from pagedweight.documents import read_document
from pagedweight.saving_folder import DTYPES, DenseFolder, Piece
from pagedweight.saving_names import pieces_by_target
from pagedweight.saving_trust import refuse_named_code
from pagedweight.shared_experts import refuse_folded

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# What a tokenizer or processor may have beside the weights; copied when a folder is quantized.
COMPANIONS = (
    *("generation_config.json", "token*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json"),
    *("*processor_config.json", "chat_template*", "LICENSE*"),
)
METHOD = "pagedweight"
# transformers takes this for the name of the weights' file and refuses it in these words, unless the quantizer is
# registered and takes it away: otherwise it would draw random experts and go on.
UNREGISTERED = "this folder's experts are paged, so import pagedweight first or use pagedweight.from_pretrained(folder)"
BESIDE = "pagedweight-beside"  # a folder of its own in the one that is written, while transformers writes


class Source(Protocol):
    """A dense model to quantize. found: its experts, in layer order."""

    found: list[ExpertsModule]

    def identity(self) -> str | None:
        """What tells its weights from others', so that a killed run may go on; None where that would take too long."""

    def weights(self, index: int) -> tuple[Tensor, Tensor]:
        """gate_up and down of one layer, as ExpertsModule.weights has them, on the device to quantize on."""

    def release(self, index: int) -> None:
        """The layer's weights are not needed any more."""

    def write_rest(self, out: Path) -> None:
        """Everything but the experts' weights, and a config that says so."""


class ModelSource:
    """A model in memory; it is left as it is."""

    def __init__(self, model: nn.Module) -> None:
        if hasattr(model, "pagedweight"):
            raise ValueError(
                "the model is patched; write it with pagedweight.save(model, directory), or unpatch it first"
            )
        refuse_folded(model)
        self._model = model
        self.found = find_experts(model)

    def identity(self) -> None:
        return None

    def weights(self, index: int) -> tuple[Tensor, Tensor]:
        return self.found[index].weights()

    def release(self, index: int) -> None:
        """They stay the model's."""

    def write_rest(self, out: Path) -> None:
        prefixes = tuple(f"{experts.path}." for experts in self.found)
        rest = {name: t for name, t in self._model.state_dict().items() if not name.startswith(prefixes)}
        save_rest(self._model, out, rest | _biases(self.found))


class FolderSource:
    """A folder of safetensors. At most one layer's weights are in memory.

    ValueError when it has none, is quantized already, or lacks a tensor; saving_names.UnknownConversion when only
    transformers knows how its experts are put together.
    """

    def __init__(self, folder: Path, device: torch.device) -> None:
        self._config = _dense_config(folder)
        self._companions = _companions(folder)
        self._folder = DenseFolder(folder)
        self._device = device
        self._model = _meta_model(folder)
        self.found = find_experts(self._model, on_meta=True)
        self._shapes = {
            f"{experts.path}.{name}": experts.module.get_parameter(name).shape
            for experts in self.found
            for name in (*experts.storage.names, *_bias_names(experts))
        }
        self._pieces = pieces_by_target(self._folder, self._model, self._shapes)
        for pieces in self._pieces.values():
            self._dtype(pieces)  # what cannot be read is refused before hours of work

    def identity(self) -> str:
        return self._folder.identity()

    def weights(self, index: int) -> tuple[Tensor, Tensor]:
        experts = self.found[index]
        self._fill(experts, experts.storage.names)
        gate_up, down = experts.weights()
        return gate_up.to(self._device), down.to(self._device)

    def release(self, index: int) -> None:
        self.found[index].drop_weights()

    def write_rest(self, out: Path) -> None:
        for experts in self.found:
            self._fill(experts, _bias_names(experts))
        taken = {piece.name for pieces in self._pieces.values() for piece in pieces}
        self._folder.copy_rest(out, taken, _biases(self.found))
        for path in self._companions:
            shutil.copy2(path, out / path.name)
        write_config(out, self._config)

    def _fill(self, experts: ExpertsModule, names: tuple[str, ...]) -> None:
        for name in names:
            target = f"{experts.path}.{name}"
            tensor = torch.empty(self._shapes[target], dtype=self._dtype(self._pieces[target]))
            self._folder.read(tensor, self._pieces[target])
            holder, _, own = name.rpartition(".")
            experts.module.get_submodule(holder).register_parameter(own, nn.Parameter(tensor, requires_grad=False))

    def _dtype(self, pieces: list[Piece]) -> torch.dtype:
        found = {self._folder.tensors[piece.name].dtype for piece in pieces}
        if len(found) > 1 or not found <= DTYPES.keys():
            raise ValueError(
                f"{pieces[0].name} and its like are {', '.join(sorted(found))}; give a model in one of bfloat16, "
                "float16 and float32"
            )
        return DTYPES[found.pop()]


def _bias_names(experts: ExpertsModule) -> tuple[str, ...]:
    """Names of the module's own bias parameters."""
    own = {name for name, _ in experts.module.named_parameters()}
    return tuple(sorted(name for name in own - set(experts.storage.names) if name.endswith("_bias")))


def _biases(found: list[ExpertsModule]) -> dict[str, Tensor]:
    """Biases as paged experts keep them, by their name in the model."""
    return {f"{e.path}.{name}": bias.contiguous() for e in found for name, bias in e.biases().items()}


def _companions(folder: Path) -> list[Path]:
    """Files to copy. ValueError for a link that would have another of this machine's files copied."""
    found = sorted({path for pattern in COMPANIONS for path in folder.glob(pattern) if path.is_file()})
    for path in found:
        if leaves_folder(path):
            raise ValueError(f"{path} is a link out of its folder; copy the file there")
    return found


def _dense_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder} has no config.json; give a model's folder as save_pretrained writes it")
    try:
        config = read_document(path, constants=True)
        method = (config.get("quantization_config") or {}).get("quant_method")
    except (OSError, AttributeError, ValueError) as error:
        raise ValueError(f"{path} is damaged ({error}); download the model again") from error
    if method:
        raise ValueError(f"{folder} is quantized already ({method}); give the model in 16 or 32 bits")
    refuse_named_code(config, path)
    return config


def refuse_dense(out: Path) -> None:
    """ValueError for a folder that holds a dense model: writing pages there would take its weights away."""
    if not any(out.glob("model*.safetensors")):
        return
    try:
        config = read_document(out / "config.json", constants=True)
        method = (config.get("quantization_config") or {}).get("quant_method")
    except (OSError, AttributeError, ValueError):
        return  # what no config tells of was left by a run that was killed
    if method != METHOD:
        raise ValueError(f"{out} holds a dense model, whose weights would be lost; write to another folder")


def write_config(out: Path, config: Mapping[str, Any]) -> None:
    """The model's config.json with a word that its experts are paged."""
    content = {**config, "quantization_config": {"quant_method": METHOD}, "transformers_weights": UNREGISTERED}
    (out / "config.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def save_rest(model: nn.Module, out: Path, state: dict[str, Tensor], **kwargs: Any) -> None:
    """Everything but the experts as transformers saves it, and a config that says so; nothing of another kind of model.

    Beside at first: transformers writes an ordinary config before the weights, and what a killed run leaves in `out`
    must not load as a dense model without its experts.
    """
    if not hasattr(model, "save_pretrained"):
        return
    beside = out / BESIDE
    shutil.rmtree(beside, ignore_errors=True)
    # Not model.save_pretrained: a patched model's own writes the pages too.
    type(model).save_pretrained(model, beside, state_dict=state, **kwargs)
    write_config(out, json.loads((beside / "config.json").read_text(encoding="utf-8")))
    (beside / "config.json").unlink()
    for old in out.glob("model*.safetensors*"):
        old.unlink()
    for path in sorted(beside.iterdir()):
        os.replace(path, out / path.name)
    beside.rmdir()


def model_class(directory: str | Path) -> Any:
    """The class that config.json names, so that the same one comes back that was saved."""
    import transformers

    architectures = transformers.AutoConfig.from_pretrained(directory, trust_remote_code=False).architectures or []
    named = (getattr(transformers, str(name), None) for name in architectures)
    # Only a model: the file may name anything that transformers has.
    known = (kind for kind in named if isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel))
    return next(known, transformers.AutoModelForCausalLM)


def _meta_model(folder: Path) -> PreTrainedModel:
    """The model without data."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    kind = model_class(folder)
    with torch.device("meta"):
        return kind.from_config(config) if kind is transformers.AutoModelForCausalLM else kind(config)


def chosen_device(name: torch.device | str | None) -> torch.device:
    """The device of that name, the GPU if there is one by default. ValueError when torch has none such here."""
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device is {str(name)!r} ({error}); give one that torch has here") from error
    return device
