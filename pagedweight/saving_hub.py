"""Models by their names on the Hub: which files of a repository are needed, and where they are once downloaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pagedweight.checkpoint import FOLDER
from pagedweight.saving_folder import file_names
from pagedweight.saving_source import COMPANIONS, METHOD

# Arguments of transformers' from_pretrained that say where a model is downloaded from, and to.
HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "revision", "token")
SUBFOLDERS = "*/*"


def local_folder(name_or_path: str | Path) -> Path:
    """The folder of a dense model: a path, or what the Hub has under that name, downloaded.

    Only the weights that transformers itself would read: repositories often hold the same ones in other forms too.
    ValueError when there is no such folder.
    """
    path = Path(name_or_path)
    if path.is_dir():
        return path
    if not is_hub_name(name_or_path):
        raise ValueError(f"there is no folder {name_or_path}; give a model's folder or its name on the Hub")
    folder = _download(name_or_path, ["*.json", *COMPANIONS], SUBFOLDERS)
    return _download(name_or_path, file_names(folder), SUBFOLDERS)


def paged_folder(name_or_path: str | Path, arguments: Mapping[str, Any]) -> Path | None:
    """The folder with pages: a path, or what the Hub has under that name, downloaded; None for a dense model.

    arguments: of from_pretrained; those of HUB_ARGUMENTS are used.
    """
    path = Path(name_or_path)
    if path.is_dir() or not is_hub_name(name_or_path):
        return path if (path / FOLDER).is_dir() else None
    from transformers import PreTrainedConfig

    hub = {name: arguments[name] for name in HUB_ARGUMENTS if name in arguments}
    config, _ = PreTrainedConfig.get_config_dict(str(name_or_path), **hub)
    if (config.get("quantization_config") or {}).get("quant_method") != METHOD:
        return None
    return _download(name_or_path, None, None, **hub)


def pages_beside(folder: Path, name: str) -> None:
    """Download the pages of a model whose other files transformers has put into the Hub's cache."""
    if (folder / FOLDER).is_dir() or folder.parent.name != "snapshots" or not is_hub_name(name):
        return
    _download(name, [f"{FOLDER}/*"], None, revision=folder.name, cache_dir=folder.parents[2])


def is_hub_name(name: str | Path) -> bool:
    """Whether it may be a repository's: what exists here, ./folder and folder/ are paths."""
    path, text = Path(name), str(name)
    if path.is_absolute() or path.exists() or text.startswith((".", "~")) or text.endswith("/"):
        return False
    return len(path.parts) <= 2


def _download(name: str | Path, wanted: list[str] | None, ignored: str | None, **hub: Any) -> Path:
    """A repository's files in the Hub's cache. OSError when they cannot be had."""
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(str(name), allow_patterns=wanted, ignore_patterns=ignored, **hub))
    except OSError as error:
        raise OSError(f"{name} is no folder here, and the Hub does not give it: {error}") from error
