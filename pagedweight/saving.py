"""Folders that hold a whole quantized model: Hugging Face files for all but the experts, pages beside them.

The pages' metadata is written last, so a folder whose writing was interrupted never loads.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pagedweight.checkpoint import FOLDER, Checkpoint, CheckpointError, CheckpointWriter
from pagedweight.discovery import PARAMETERS, ExpertsModule, find_experts
from pagedweight.layout import normalized_widths
from pagedweight.patching import WIDTHS, assemble, patch
from pagedweight.patching_model import PagedModel
from pagedweight.patching_pages import layout_of
from pagedweight.patching_quantize import Importance, Measured, quantized_blocks, sensitivity_policy
from pagedweight.policy import Policy
from pagedweight.quant.levels import Settings, check_level
from pagedweight.runtime.config import RuntimeConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# What a tokenizer or processor may have beside the weights; copied when a folder is quantized.
COMPANIONS = (
    "token*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "*processor_config.json",
)
COMPANIONS += ("chat_template*", "LICENSE*")


def quantize(
    model_or_path: PreTrainedModel | str | Path,
    out: str | Path,
    *,
    level: str = "fast",
    widths: Sequence[int] = WIDTHS,
    importance: Importance | None = None,
    seed: int = 0,
    codebooks: Mapping[int, str] | None = None,
    calibration: Measured | None = None,
) -> Path:
    """Quantize a model's routed experts into a folder that load() and from_pretrained() read; returns the folder.

    model_or_path: a transformers model, left as it is, or what its from_pretrained takes.
    level: "fast", weighted k-means on the weights alone. widths: supported bitwidths, the largest is the parent width.
    importance: by linear-block, tensors that broadcast to its (N, K), h_ij of Eq. (2); ones by default.
    codebooks: by width, how a table of it gives the codes their values, as docs/format.md defines; lut16 where not
    given. Tables stay in that form on the device: the smaller they are, the more room is left for pages.
    ValueError when the model cannot be served or a codebook cannot serve its width, before anything is written.
    """
    check_level(level, calibration is not None)
    widths = normalized_widths(tuple(widths))
    out = Path(out)
    owned = isinstance(model_or_path, str | Path)
    model = _load_dense(model_or_path) if owned else model_or_path
    if hasattr(model, "pagedweight"):
        raise ValueError("the model is patched; write it with pagedweight.save(model, directory), or unpatch it first")
    found = find_experts(model)
    layout = layout_of([experts.shape for experts in found], widths, codebooks)
    rest = _without_experts(model, found)
    writer = CheckpointWriter(out, layout)
    _save_rest(model, out, rest)
    settings = Settings(level, layout.widths, layout.codebooks, seed)
    for index, experts in enumerate(found):
        weights = tuple(getattr(experts.module, name).detach() for name in PARAMETERS)
        stakes = None if calibration is None else calibration.importance(index)
        for made in quantized_blocks(experts.shape, weights, settings, stakes=stakes, importance=importance):
            writer.add(*made)
    if owned:
        _copy_companions(Path(model_or_path), out)
    sensitivity_policy(layout, np.array(writer.s_bar), calibration).save(out / FOLDER)
    writer.finish()
    return out


def save(model: PreTrainedModel, directory: str | Path) -> None:
    """Write a patched model with every plane and table, wherever they are now, and its policy.

    What load() makes of it equals this model at the same widths, bit for bit.
    """
    paged = getattr(model, "pagedweight", None)
    if not isinstance(paged, PagedModel):
        raise ValueError(
            "the model is not patched; quantize it into a folder with pagedweight.quantize(model, directory)"
        )
    directory = Path(directory)
    writer = CheckpointWriter(directory, paged.layout)
    _save_rest(model, directory, model.state_dict())
    for block, packed in paged.store.blocks():
        writer.add(block, packed)
    paged.policy.save(directory / FOLDER)
    writer.finish()


def load(
    directory: str | Path,
    *,
    policy: Policy | None = None,
    config: RuntimeConfig | None = None,
    verify: bool = True,
    **kwargs: Any,
) -> PreTrainedModel:
    """A patched model from a folder of quantize() or save(). Dense expert weights are never built.

    policy: instead of the folder's. verify: read every page once more and compare checksums first.
    kwargs: for transformers' from_pretrained (dtype, device_map to one device, attn_implementation, ...).
    CheckpointError when the folder is not a whole checkpoint; ValueError when the budget will not do.
    """
    opened = Checkpoint.open(directory)
    _check_marked(Path(directory))
    if verify:
        opened.verify()
    model, report = _model_class(directory).from_pretrained(directory, output_loading_info=True, **kwargs)
    missing = sorted(report["missing_keys"])
    if missing:
        # transformers fills these with random numbers and warns.
        raise CheckpointError(f"{directory} lacks {', '.join(missing[:3])}; quantize the model again")
    return assemble(model, _take_found(model), model.device, directory, policy, config or RuntimeConfig())


def from_pretrained(
    name_or_path: str | Path,
    *,
    policy: Policy | None = None,
    config: RuntimeConfig | None = None,
    **kwargs: Any,
) -> PreTrainedModel:
    """A patched model: load() for a folder with pages, else the dense model, quantized now at level "fast"."""
    if (Path(name_or_path) / FOLDER).is_dir():
        return load(name_or_path, policy=policy, config=config, **kwargs)
    model = _load_dense(name_or_path, **kwargs)
    return patch(model, policy=policy, config=config)


def _check_marked(directory: Path) -> None:
    """CheckpointError unless config.json says that experts are paged: without it transformers makes some up."""
    from pagedweight.integrations.hf_quantizer import METHOD

    path = directory / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{directory} has pages but no config.json; copy the whole folder")
    marked = json.loads(path.read_text(encoding="utf-8")).get("quantization_config") or {}
    if marked.get("quant_method") != METHOD:
        raise CheckpointError(f"{path} does not say that its experts are paged; quantize the model again")


def _model_class(directory: str | Path) -> Any:
    """The class that config.json names, so that the same one comes back that was saved."""
    import transformers

    architectures = transformers.AutoConfig.from_pretrained(directory).architectures or []
    known = next((getattr(transformers, name) for name in architectures if hasattr(transformers, name)), None)
    return known or transformers.AutoModelForCausalLM


def _load_dense(name_or_path: str | Path, **kwargs: Any) -> PreTrainedModel:
    """The dense model, in its own dtype unless another is asked for."""
    from transformers import AutoModelForCausalLM

    if Path(name_or_path).is_absolute() and not Path(name_or_path).exists():
        # transformers would complain of a malformed name on the Hub.
        raise ValueError(f"there is no folder {name_or_path}; give a model's folder or its name on the Hub")
    model = AutoModelForCausalLM.from_pretrained(name_or_path, **kwargs)
    if _take_found(model) is not None:
        raise ValueError(
            f"{name_or_path} holds paged experts; download it into a folder and load that with pagedweight.load"
        )
    return model


def _take_found(model: PreTrainedModel) -> list[ExpertsModule] | None:
    from pagedweight.integrations.hf_quantizer import take_found

    return take_found(model)


def _without_experts(model: PreTrainedModel, found: list[ExpertsModule]) -> dict[str, torch.Tensor]:
    prefixes = tuple(f"{experts.path}." for experts in found)
    return {name: tensor for name, tensor in model.state_dict().items() if not name.startswith(prefixes)}


def _save_rest(model: PreTrainedModel, directory: Path, state: dict[str, torch.Tensor]) -> None:
    """Everything but the experts as transformers saves it, and a config that says so."""
    from pagedweight.integrations.hf_quantizer import METHOD

    # Not model.save_pretrained: a patched model refuses that, since it alone would lose the experts.
    type(model).save_pretrained(model, directory, state_dict=state)
    path = directory / "config.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    content["quantization_config"] = {"quant_method": METHOD}
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _copy_companions(source: Path, out: Path) -> None:
    if source.is_dir():
        for pattern in COMPANIONS:
            for path in source.glob(pattern):
                shutil.copy2(path, out / path.name)
