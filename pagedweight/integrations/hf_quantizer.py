"""transformers' own hook for quantized checkpoints: build the model without expert weights, load all the rest.

Importing this module registers the method "pagedweight". The pages themselves never pass through the HF loader.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.utils.quantization_config import QuantizationConfigMixin

from pagedweight.discovery import ExpertsModule, find_experts

METHOD = "pagedweight"


class PagedWeightConfig(QuantizationConfigMixin):
    """What config.json says of a checkpoint with paged experts: only that it is one."""

    def __init__(self, **kwargs: object) -> None:
        self.quant_method = METHOD


class AwaitingPages(nn.Module):
    """Stands where paged experts will be until the runtime is there; only their biases are loaded into it."""

    def __init__(self, biases: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        for name, bias in biases.items():
            self.register_parameter(name, nn.Parameter(bias, requires_grad=False))

    def forward(self, *args: object, **kwargs: object) -> NoReturn:
        raise RuntimeError("this model's expert pages are not loaded; load it with pagedweight.load(directory)")


class PagedWeightQuantizer(HfQuantizer):
    """Takes the experts out before loading; `found` remembers where they stood and what they were."""

    requires_calibration = True

    def __init__(self, quantization_config: QuantizationConfigMixin, **kwargs: object) -> None:
        super().__init__(quantization_config, **kwargs)
        # What the loader sees is an ordinary dense model, to be cast like one: of a quantized one, transformers 5.17
        # would leave every renamed tensor in the file's dtype.
        self.pre_quantized = False

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: object) -> None:
        self.found: list[ExpertsModule] = find_experts(model, on_meta=True)
        for experts in self.found:
            experts.drop_weights()
            model.set_submodule(experts.path, AwaitingPages(experts.biases()))

    def is_serializable(self, *args: object, **kwargs: object) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False


def take_found(model: PreTrainedModel) -> list[ExpertsModule] | None:
    """The experts that were taken out of a freshly loaded model, which then is an ordinary model again; None when it
    was not loaded from paged files."""
    quantizer = getattr(model, "hf_quantizer", None)
    if not isinstance(quantizer, PagedWeightQuantizer):
        return None
    quantizer.remove_quantization_config(model)
    for experts in quantizer.found:
        loaded = dict(model.get_submodule(experts.path).named_parameters())
        experts.put_biases({name: bias.detach() for name, bias in loaded.items()})
    return quantizer.found


def _register() -> None:
    if METHOD not in AUTO_QUANTIZER_MAPPING:
        register_quantization_config(METHOD)(PagedWeightConfig)
        register_quantizer(METHOD)(PagedWeightQuantizer)


_register()
