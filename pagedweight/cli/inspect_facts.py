"""What `pagedweight inspect` says of a folder with pages, as values: shapes, bytes by width, experts, sensitivity."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pagedweight.calibration.pipeline import REPORT
from pagedweight.checkpoint import FOLDER, Checkpoint
from pagedweight.cli.quantize import bytes_by_width
from pagedweight.documents import read_document
from pagedweight.layout import Layout, MoeLayer, Projection, table_bytes
from pagedweight.patching import policy_of
from pagedweight.patching_sizes import resident_bytes
from pagedweight.policy import Policy

if TYPE_CHECKING:
    from pagedweight.cli.bars import Bars

COLD_SHARE = 0.25  # of an equal share of its layer's routing mass


class WidthBytes(NamedTuple):
    """All linear-blocks at one width. planes, tables: bytes in the files; resident: in whole frames of an arena."""

    codebook: str
    planes_bytes: int
    tables_bytes: int
    resident_bytes: int
    bits_per_weight: float
    sensitivity: float


class LayerFacts(NamedTuple):
    """One MoE layer. shares: (E,) routing mass in equal shares; sensitivity: (E, 2, W), s_i^b by projection, width.

    cold: experts that get less than COLD_SHARE of an equal share, or that calibration's text hardly reached.
    """

    shape: MoeLayer
    shares: np.ndarray
    sensitivity: np.ndarray
    cold: tuple[int, ...]


class Facts(NamedTuple):
    """A folder with pages. calibrated: whether its policy knows routing, or quantization errors alone."""

    folder: Path
    layout: Layout
    recipe: Mapping[str, str]
    calibrated: bool
    widths: dict[int, WidthBytes]
    layers: list[LayerFacts]

    def document(self) -> dict[str, object]:
        """Everything, for --json."""
        return {
            "folder": str(self.folder),
            "recipe": dict(self.recipe),
            "calibrated": self.calibrated,
            "linear_blocks": self.layout.rows,
            "weights": self.layout.weights(),
            "widths": {str(bits): seen._asdict() for bits, seen in self.widths.items()},
            "layers": [
                asdict(layer.shape)
                | {"cold_experts": list(layer.cold), "routing_shares": layer.shares.tolist()}
                | {"sensitivity": {p.label: layer.sensitivity[:, p].tolist() for p in Projection}}
                for layer in self.layers
            ],
        }


def facts_of(folder: Path, *, verify: Bars | None = None) -> Facts:
    """Read a folder's metadata and policy, not its pages; verify: read and hash every page too, with bars.

    CheckpointError when it has no whole pages, ValueError when its policy is damaged or another model's.
    """
    opened, policy = Checkpoint.open(folder), policy_of(folder)
    policy.check_layout(opened.layout)
    if verify is not None:
        opened.verify(verify)
    unreached = _unreached(folder)
    layers = list(_layers(opened.layout, policy, unreached or {}))
    even = all(np.ptp(layer.shares) < 1e-9 for layer in layers)
    calibrated = unreached is not None or not even
    return Facts(folder, opened.layout, opened.recipe, calibrated, _widths(opened.layout, policy), layers)


def _widths(layout: Layout, policy: Policy) -> dict[int, WidthBytes]:
    resident, sensitivity = resident_bytes(layout).sum(axis=0), policy.sensitivity.sum(axis=0)
    found = {}
    for at, (bits, held) in enumerate(bytes_by_width(layout).items()):
        codebook = layout.codebooks[bits]
        tables = sum(table_bytes(codebook, n, bits) for n, _ in layout.row_shapes())
        per_weight = 8 * held / layout.weights()
        found[bits] = WidthBytes(codebook, held - tables, tables, int(resident[at]), per_weight, float(sensitivity[at]))
    return found


def _layers(layout: Layout, policy: Policy, unreached: Mapping[int, set[int]]) -> Iterator[LayerFacts]:
    for at, shape in enumerate(layout.moe_layers):
        rows = slice(layout.first_row(at), layout.first_row(at) + 2 * shape.experts)
        mass = policy.m_cal[rows].reshape(shape.experts, 2).max(axis=1)
        shares = mass * shape.experts / (mass.sum() or 1.0)
        cold = set(np.flatnonzero(shares < COLD_SHARE).tolist()) | unreached.get(shape.layer, set())
        sensitivity = policy.sensitivity[rows].reshape(shape.experts, 2, len(layout.widths))
        yield LayerFacts(shape, shares, sensitivity, tuple(sorted(cold)))


def _unreached(folder: Path) -> dict[int, set[int]] | None:
    """Experts by layer that calibration's text hardly reached, from its report; None where there is no report."""
    path = folder / FOLDER / REPORT
    if not path.is_file():
        return None
    found: dict[int, set[int]] = {}
    try:
        for name in read_document(path)["cold"]:
            _, layer, _, expert, _ = name.split(".")
            found.setdefault(int(layer), set()).add(int(expert))
    except (AttributeError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}); calibrate again") from error
    return found
