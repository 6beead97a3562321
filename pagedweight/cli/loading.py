"""A quantized model for the commands that run one: its pages are checked first, with a bar."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from pagedweight.cli.bars import Bars


def load_checked(checkpoint: Path, progress: Bars, **options: Any) -> PreTrainedModel:
    """pagedweight.load() in evaluation mode. CheckpointError or another ValueError, or OSError, as there."""
    import pagedweight
    from pagedweight.checkpoint import Checkpoint
    from pagedweight.demo.run import quiet_transformers

    Checkpoint.open(checkpoint).verify(progress)
    progress("loading", 0, None)
    with quiet_transformers():
        model = pagedweight.load(checkpoint, verify=False, **options)
    progress("loading", 1, 1)
    return model.eval()
