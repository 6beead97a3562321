"""transformers' own hooks for quantized models: from_pretrained of a folder with pages, or of a dense one to quantize.

Importing this module registers the method "pagedweight". The pages themselves never pass through the HF loader. It is
imported while transformers is (see hf_register), so nothing here may import more of it than its quantizers.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from torch import nn
from transformers.quantizers.auto import (
    AUTO_QUANTIZER_MAPPING,
    register_quantization_config,
    register_quantizer,
)
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from pagedweight.checkpoint import FOLDER, Checkpoint, CheckpointError
from pagedweight.discovery import find_experts
from pagedweight.discovery_devices import devices_of
from pagedweight.discovery_experts import ExpertsModule
from pagedweight.layout import Layout
from pagedweight.patching import assemble, check_kind, patch
from pagedweight.patching_sizes import resident_bytes
from pagedweight.quant.levels import check_level
from pagedweight.runtime.config import RuntimeConfig
from pagedweight.saving_hub import pages_beside
from pagedweight.saving_source import METHOD

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


class PagedWeightConfig(QuantizationConfigMixin):
    """quantization_config of a model with paged experts. In config.json it says only that they are.

    runtime: for from_pretrained of a dense model; a folder with pages gets the defaults, or what pagedweight.load is
    given. level: how a dense model is quantized. deferred: leave the experts out, for pagedweight.load to put in.
    """

    def __init__(
        self,
        runtime: RuntimeConfig | None = None,
        level: str = "fast",
        deferred: bool = False,
        quant_method: str = METHOD,  # as config.json names it
    ) -> None:
        check_level(level, calibrated=False)
        check_kind("runtime", runtime, RuntimeConfig, "RuntimeConfig(budget_bytes=...)")
        self.quant_method = quant_method
        self.runtime = runtime
        self.level = level
        self.deferred = deferred

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """As config.json has it, or deferred_config: a file says that experts are paged, and chooses nothing else."""
        others = sorted(set(config_dict) - {"quant_method", "deferred"})
        if others:
            warnings.warn(
                f"quantization_config has {', '.join(others)[:200]}, which no file decides; ignored", stacklevel=2
            )
        return super().from_dict({"deferred": config_dict.get("deferred") is True}, *args, **kwargs)

    def to_dict(self) -> dict[str, Any]:
        return {"quant_method": self.quant_method}


class AwaitingPages(nn.Module):
    """Stands where paged experts will be until the runtime is there; only their biases are loaded into it.

    size_bytes: what they will take at the parent width. `pages` is a byte that counts as so many, for a device map.
    """

    def __init__(self, biases: Mapping[str, torch.Tensor], size_bytes: int) -> None:
        super().__init__()
        self.size_bytes = size_bytes
        self.register_buffer("pages", torch.empty(1, dtype=torch.uint8, device="meta"), persistent=False)
        for name, bias in biases.items():
            self.register_parameter(name, nn.Parameter(bias, requires_grad=False))

    def forward(self, *args: object, **kwargs: object) -> NoReturn:
        raise RuntimeError("this model's expert pages are not loaded; load it with pagedweight.load(directory)")


class PagedWeightQuantizer(HfQuantizer):
    """Takes the experts out before loading; `found` remembers where they stood and what they were.

    Of a dense model it leaves them in, and patches it once it is loaded.
    """

    found: list[ExpertsModule] | None = None
    folder: Path

    def __init__(self, quantization_config: PagedWeightConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self._has_pages = self.pre_quantized
        # What the loader sees is an ordinary dense model, to be cast like one: of a quantized one, transformers 5.17
        # would leave every renamed tensor in the file's dtype.
        self.pre_quantized = False

    def update_attn_implementation(self, config: PreTrainedConfig) -> PreTrainedConfig:
        """The first to see the config, from transformers 5.18 on."""
        return _without_warning(config)

    def update_tp_plan(self, config: PreTrainedConfig) -> PreTrainedConfig:
        """The first to see the config, up to transformers 5.17."""
        return _without_warning(config)

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> None:
        found = find_experts(model, on_meta=True)
        if not self._has_pages:
            return
        self.folder = Path(checkpoint_files[0]).parent
        if not self.quantization_config.deferred:
            pages_beside(self.folder, model.config.name_or_path)
            if not (self.folder / FOLDER).is_dir():
                raise CheckpointError(
                    f"{self.folder} has no folder {FOLDER} with the pages of its experts; download the whole of it"
                )
            Checkpoint.open(self.folder).verify()
        sizes = layer_bytes(Checkpoint.open(self.folder).layout)
        for experts in found:
            experts.drop_weights()
            model.set_submodule(experts.path, AwaitingPages(experts.biases(), sizes.get(experts.shape.layer, 0)))
        self.found = found

    def param_element_size(self, model: PreTrainedModel, param_name: str, param: torch.Tensor) -> float:
        """Bytes of an element; transformers asks for them when it spreads layers over devices."""
        holder, _, own = param_name.rpartition(".")
        module = model.get_submodule(holder)
        if own == "pages" and isinstance(module, AwaitingPages):
            return module.size_bytes
        return super().param_element_size(model, param_name, param)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        if self.quantization_config.deferred:
            return
        config = self.quantization_config.runtime or RuntimeConfig()
        found = take_found(model)
        if found is None:
            patch(model, config=config, level=self.quantization_config.level)
        else:
            assemble(model, found, devices_of(model, found), self.folder, None, config)

    def is_serializable(self, *args: object, **kwargs: object) -> bool:
        return False

    @property
    def is_compileable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return False


def layer_bytes(layout: Layout) -> dict[int, int]:
    """What the experts of each layer, by the model's own numbers, take at the parent width."""
    of_rows = resident_bytes(layout)[:, -1]
    first = [layout.first_row(index) for index in range(len(layout.moe_layers))]
    sums = np.add.reduceat(of_rows, first).tolist()
    return {layer.layer: size for layer, size in zip(layout.moe_layers, sums, strict=True)}


def _without_warning(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config without the words that stop those who lack this module."""
    if hasattr(config, "transformers_weights"):
        del config.transformers_weights
    return config


def deferred_config(directory: str | Path) -> PreTrainedConfig:
    """The config of a folder with pages, so that from_pretrained leaves its experts to the caller."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    config.quantization_config = {"quant_method": METHOD, "deferred": True}
    return config


def take_found(model: PreTrainedModel) -> list[ExpertsModule] | None:
    """Make a freshly loaded model an ordinary one again; the experts that were taken out of it, None if none were."""
    quantizer = getattr(model, "hf_quantizer", None)
    if not isinstance(quantizer, PagedWeightQuantizer):
        return None
    quantizer.remove_quantization_config(model)
    for experts in quantizer.found or ():
        loaded = dict(model.get_submodule(experts.path).named_parameters())
        experts.put_biases({name: bias.detach() for name, bias in loaded.items()})
    return quantizer.found


def _register() -> None:
    if METHOD not in AUTO_QUANTIZER_MAPPING:
        register_quantization_config(METHOD)(PagedWeightConfig)
        register_quantizer(METHOD)(PagedWeightQuantizer)


_register()
