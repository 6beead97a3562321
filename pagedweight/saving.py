"""Folders that hold a whole quantized model: Hugging Face files for all but the experts, pages beside them.

The pages' metadata is written last, so a folder whose writing was interrupted never loads.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagedweight.checkpoint import Checkpoint, CheckpointError
from pagedweight.discovery_devices import devices_of
from pagedweight.discovery_experts import ExpertsModule
from pagedweight.documents import read_document
from pagedweight.patching import assemble, check_options, patch
from pagedweight.policy import Policy
from pagedweight.runtime.config import RuntimeConfig
from pagedweight.saving_hub import HUB_ARGUMENTS, is_hub_name, paged_folder
from pagedweight.saving_source import METHOD, model_class
from pagedweight.saving_trust import refuse_named_code

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load(
    directory: str | Path,
    *,
    policy: Policy | None = None,
    config: RuntimeConfig | None = None,
    verify: bool = True,
    **kwargs: Any,
) -> PreTrainedModel:
    """A patched model from a folder of quantize() or save(). Dense expert weights are never built.

    policy: instead of the folder's. config: without budget_bytes everything stays at the parent width and the KV cache
        stays outside. verify: read every page once more and compare checksums first.
    kwargs: for transformers' from_pretrained (dtype, device_map to one GPU or several, attn_implementation, ...).
    CheckpointError when the folder is not a whole checkpoint; ValueError when the budget will not do.
    """
    from pagedweight.integrations.hf_quantizer import deferred_config

    check_options(policy, config, kwargs)
    opened = Checkpoint.open(directory)
    _check_marked(Path(directory))
    if verify:
        opened.verify()
    model, report = model_class(directory).from_pretrained(
        directory,
        config=deferred_config(directory),
        output_loading_info=True,
        **{"trust_remote_code": False, **kwargs},
    )
    missing = sorted(report["missing_keys"])
    if missing:
        # transformers fills these with random numbers and warns.
        raise CheckpointError(f"{directory} lacks {', '.join(missing[:3])}; quantize the model again")
    found = _take_found(model)
    return assemble(model, found, devices_of(model, found), directory, policy, config or RuntimeConfig())


def from_pretrained(
    name_or_path: str | Path,
    *,
    policy: Policy | None = None,
    config: RuntimeConfig | None = None,
    **kwargs: Any,
) -> PreTrainedModel:
    """A patched model: load() for a folder with pages, else the dense model, quantized now at level "fast".

    name_or_path: a folder, or a name on the Hub; of a paged model there, everything is downloaded first.
    policy, config: as in load(). kwargs: for transformers' from_pretrained, those of a download included (revision,
        token, cache_dir, ...).
    CheckpointError, ValueError: as in load() and patch(). OSError where there is neither folder nor download.
    """
    check_options(policy, config, kwargs)
    folder = paged_folder(name_or_path, kwargs)
    if folder is not None:
        own = {name: value for name, value in kwargs.items() if name not in HUB_ARGUMENTS}
        return load(folder, policy=policy, config=config, **own)
    model = load_dense(name_or_path, **kwargs)
    return patch(model, policy=policy, config=config)


def _check_marked(directory: Path) -> None:
    """CheckpointError unless config.json says that experts are paged: without it transformers makes some up."""
    path = directory / "config.json"
    if not path.is_file():
        raise CheckpointError(
            f"{directory} has pages but no config.json; copy the whole folder, or give a model of your own its pages "
            "with patch(model, checkpoint=folder)"
        )
    try:
        config = read_document(path, constants=True)
        marked = config["quantization_config"]
    except (OSError, KeyError, TypeError, ValueError):
        marked = None
    if not isinstance(marked, dict) or marked.get("quant_method") != METHOD:
        raise CheckpointError(f"{path} does not say that its experts are paged; quantize the model again")
    refuse_named_code(config, path)


def load_dense(name_or_path: str | Path, **kwargs: Any) -> PreTrainedModel:
    """The dense model, in its own dtype unless another is asked for."""
    from transformers import AutoModelForCausalLM, PreTrainedConfig

    if not Path(name_or_path).exists() and not is_hub_name(name_or_path):
        # transformers would complain of a malformed name on the Hub.
        raise ValueError(f"there is no folder {name_or_path}; give a model's folder or its name on the Hub")
    hub = {name: kwargs[name] for name in HUB_ARGUMENTS if name in kwargs}
    refuse_named_code(PreTrainedConfig.get_config_dict(name_or_path, **hub)[0], name_or_path)
    model = AutoModelForCausalLM.from_pretrained(name_or_path, **{"trust_remote_code": False, **kwargs})
    if hasattr(model, "pagedweight"):
        raise ValueError(
            f"{name_or_path} holds paged experts; download it into a folder and load that with pagedweight.load"
        )
    return model


def _take_found(model: PreTrainedModel) -> list[ExpertsModule] | None:
    from pagedweight.integrations.hf_quantizer import take_found

    return take_found(model)
