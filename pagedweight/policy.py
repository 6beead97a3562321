"""Policy: everything offline calibration hands the planner (the paper's Omega_off), as plain numpy data.

A policy is a pair of files beside the checkpoint: policy.safetensors (arrays) and policy.json (version, scalars).
"""

from __future__ import annotations

import json
import math
import os
import warnings
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from pagedweight.documents import read_document
from pagedweight.layout import Layout
from pagedweight.policy_checks import ARRAYS, INTEGER_ARRAYS, SCALARS, check_policy

FORMAT_VERSION = 1
_ARRAYS = (*INTEGER_ARRAYS, *ARRAYS)
# Policies written before a field was there mean this by its absence, and zeros by that of feature_center.
_BEFORE = {"mass_trust": 0.0}


class PolicyError(ValueError):
    """A policy's files are damaged or of another version; the message says which and why."""


class ExpertIndex(NamedTuple):
    """Which rows are an expert's; X experts of all layers, in the order of their first rows.

    layer, projection, expert: int64 (R,), every row's layer index 0..L-1, expert and projection. in_order: whether rows
    ascend by (layer, expert, projection). of_row: (R,), every row's place among the X experts.
    expert_layer, expert_number: (X,). exists: bool (L, E), False where a layer has fewer experts.
    mass: (X,) m_cal of each expert. layer_mass: (L,), its sum.
    """

    layer: np.ndarray
    expert: np.ndarray
    projection: np.ndarray
    in_order: bool
    of_row: np.ndarray
    expert_layer: np.ndarray
    expert_number: np.ndarray
    exists: np.ndarray
    mass: np.ndarray
    layer_mass: np.ndarray


@dataclass(frozen=True, eq=False)
class Policy:
    """Offline calibration's results. R rows in layout order, W widths, 2 projections; float64 unless said.

    blocks: int64 (R, 3), each row's (layer number, expert, projection).
    widths: the supported bitwidths, ascending; index w below means widths[w].
    s_bar: (R, W), damage per unit of routing mass at each width; s_i^b is s_bar * m_cal.
    m_cal: (R,), routing mass of the row's expert seen in calibration.
    bucket_edges: (buckets - 1,), ascending shares in (0, 1): an expert's bucket is the number of edges that the share
        of strictly colder experts in its layer reaches. Bucket 0 is the coldest.
    multipliers: (buckets,), mu: weighs predicted damage by bucket once live routing is known.
    floors: int64 (stages, buckets), lowest width by bitwidth-floor stage; later stages never have higher floors.
    depth_caps: int64 (levels, buckets), most width steps one plan lowers a row by; later levels are never tighter.
    head_weights (2, W, W, 3), head_bias (2, W, W): residual heads w, a of Eq. (5) by projection, from- and to-width.
    head_confidence: (2, W, W), c of Eq. (6), from 0 to 1; 0 where there is no head.
    feature_transform: what heads read: "raw" norms phi, or their logarithms ("log").
    feature_center: (R, 3), the row's average features, which heads read its features from; zeros for the paper's heads.
    alpha, rho_min, rho_max: strength and clipping bounds of Eq. (6). epsilon: damage floor of Eq. (8).
    mass_trust: how far live routing mass, once enough tokens are counted, takes m_cal's place in s_bar * m_cal; 0
        leaves g of Eq. (4) to calibration alone, and live routing to the multipliers.
    """

    blocks: np.ndarray
    widths: tuple[int, ...]
    s_bar: np.ndarray
    m_cal: np.ndarray
    bucket_edges: np.ndarray
    multipliers: np.ndarray
    floors: np.ndarray
    depth_caps: np.ndarray
    head_weights: np.ndarray
    head_bias: np.ndarray
    head_confidence: np.ndarray
    feature_center: np.ndarray
    alpha: float = 0.0
    rho_min: float = -1.0
    rho_max: float = 1.0
    epsilon: float = 1e-12
    mass_trust: float = 1.0
    feature_transform: str = "raw"

    def __post_init__(self) -> None:
        for name in _ARRAYS:
            dtype = np.int64 if name in INTEGER_ARRAYS else np.float64
            array = np.array(getattr(self, name), dtype=dtype)
            array.flags.writeable = False
            object.__setattr__(self, name, array)
        object.__setattr__(self, "widths", tuple(int(b) for b in self.widths))
        check_policy(self)

    @classmethod
    def from_sensitivity(cls, layout: Layout, s_bar: np.ndarray, m_cal: np.ndarray) -> Policy:
        """A policy that knows sensitivity alone: one bucket, no residual, no floor above the lowest width.

        s_bar: (R, W) with R = layout.rows and W = len(layout.widths); m_cal: (R,).
        """
        width_count = len(layout.widths)
        s_bar = np.asarray(s_bar, dtype=np.float64)
        scale = float(np.mean(s_bar * np.asarray(m_cal, dtype=np.float64)[:, None])) if s_bar.ndim == 2 else 0.0
        return cls(
            blocks=np.array([(b.layer, b.expert, int(b.projection)) for b in layout.blocks()]),
            widths=layout.widths,
            s_bar=s_bar,
            m_cal=m_cal,
            bucket_edges=np.empty(0),
            multipliers=np.ones(1),
            floors=np.array([[layout.floor_width]]),
            depth_caps=np.array([[width_count]]),
            head_weights=np.zeros((2, width_count, width_count, 3)),
            head_bias=np.zeros((2, width_count, width_count)),
            head_confidence=np.zeros((2, width_count, width_count)),
            feature_center=np.zeros((len(m_cal), 3)),
            # Small beside any damage that matters, so that Eq. (8) only breaks ties between blocks that cost nothing.
            epsilon=max(1e-9 * scale, 1e-30) if math.isfinite(scale) else 1e-12,
        )

    def __repr__(self) -> str:
        """Its size: arrays of thousands of rows say nothing on a screen."""
        buckets = len(self.multipliers)
        return f"Policy({self.rows} linear-blocks, widths={self.widths}, {buckets} buckets, alpha={self.alpha})"

    @property
    def rows(self) -> int:
        return len(self.m_cal)

    @property
    def sensitivity(self) -> np.ndarray:
        """(R, W), s_i^b in units of the loss calibration measured: s_bar * m_cal."""
        return self.s_bar * self.m_cal[:, None]

    @cached_property
    def s_bar_by_width(self) -> np.ndarray:
        """(W, R), s_bar with each width's values side by side; kept, for the planner reads it at every step."""
        by_width = np.ascontiguousarray(self.s_bar.T)
        by_width.flags.writeable = False
        return by_width

    @cached_property
    def heads(self) -> tuple[np.ndarray, np.ndarray]:
        """(5, W, 2 W) twice: w, a and c of Eq. (5, 6) by one end and by (projection, other end); kept likewise.

        First with the lower end beside the projection and the upper end before it, then the other way round.
        """
        by_ends = np.concatenate([self.head_weights, self.head_bias[..., None], self.head_confidence[..., None]], -1)
        kinds, width_count = by_ends.shape[-1], len(self.widths)
        shape = (kinds, width_count, 2 * width_count)
        raising = np.ascontiguousarray(by_ends.transpose(3, 1, 0, 2)).reshape(shape)
        return raising, np.ascontiguousarray(by_ends.transpose(3, 2, 0, 1)).reshape(shape)

    @cached_property
    def experts(self) -> ExpertIndex:
        """Rows by expert; kept, for the planner reads it at every step."""
        layer, expert, projection = (np.ascontiguousarray(column) for column in self.blocks.T)
        layer = np.unique(layer, return_inverse=True)[1].reshape(-1)
        shape = (int(layer.max()) + 1, int(expert.max()) + 1)
        place = layer * shape[1] + expert
        every, first, of_row = np.unique(place, return_index=True, return_inverse=True)
        mass = np.maximum.reduceat(self.m_cal[np.argsort(place, kind="stable")], np.searchsorted(np.sort(place), every))
        exists = np.zeros(shape, dtype=bool)
        exists.reshape(-1)[every] = True
        order = 2 * place + projection
        return ExpertIndex(
            *(layer, expert, projection, bool((np.diff(order) > 0).all()), of_row.reshape(-1)),
            *(layer[first], expert[first], exists, mass, np.bincount(layer[first], mass, shape[0])),
        )

    def replaced(self, **changes: Any) -> Policy:
        """A copy with some fields changed, checked again."""
        return replace(self, **changes)

    def check_layout(self, layout: Layout) -> None:
        """ValueError unless the policy was made for this layout's blocks and widths."""
        if self.widths != layout.widths:
            raise ValueError(f"the policy is for widths {self.widths}, the model has {layout.widths}; calibrate again")
        blocks = np.array([(b.layer, b.expert, int(b.projection)) for b in layout.blocks()])
        if blocks.shape != self.blocks.shape or (blocks != self.blocks).any():
            raise ValueError(
                f"the policy is for {self.rows} linear-blocks that are not the model's {layout.rows}; calibrate again"
            )

    def save(self, folder: str | Path) -> None:
        """Write policy.safetensors and policy.json into a folder that exists."""
        folder = Path(folder)
        # safetensors' own save_file makes files that only their owner may read.
        unfinished = folder / "policy.safetensors.tmp"
        unfinished.write_bytes(save({name: np.ascontiguousarray(getattr(self, name)) for name in _ARRAYS}))
        os.replace(unfinished, folder / "policy.safetensors")
        scalars = {name: getattr(self, name) for name in (*SCALARS, "feature_transform")}
        document = {"format_version": FORMAT_VERSION, "widths": list(self.widths), **scalars}
        (folder / "policy.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: str | Path) -> Policy:
        """Read what save wrote. Unknown fields of newer writers warn; damaged or non-finite content is a PolicyError.

        folder: that of the files, such as `pagedweight` within a model's.
        FileNotFoundError when there is no such file.
        """
        folder = Path(folder)
        document = _scalars(folder / "policy.json")
        if (folder / "policy.safetensors").exists() and not (folder / "policy.safetensors").is_file():
            raise PolicyError(f"{folder / 'policy.safetensors'} is no ordinary file; calibrate again")
        try:
            arrays = load_file(folder / "policy.safetensors")
        except FileNotFoundError:
            raise
        except (SafetensorError, OSError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise PolicyError(
                f"{folder / 'policy.safetensors'} is damaged ({str(error)[:300]}); calibrate again"
            ) from error
        if document.get("format_version") != FORMAT_VERSION:
            raise PolicyError(
                f"{folder / 'policy.json'} has format_version {document.get('format_version')!r:.80}; "
                f"this release reads {FORMAT_VERSION}"
            )
        content = _known_fields(folder, document, arrays)
        try:
            return cls(**content)
        except PolicyError:
            raise
        except (TypeError, ValueError, OverflowError) as error:
            raise PolicyError(f"the policy in {folder} cannot be used: {str(error)[:500]}") from error


def _scalars(path: Path) -> dict[str, object]:
    """The scalars and widths of policy.json, of their own types."""
    try:
        document = read_document(path)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise PolicyError(f"{path} is not JSON ({error}); calibrate again") from error
    if not isinstance(document, dict):
        raise PolicyError(f"{path} holds a {type(document).__name__}; it must hold one object")
    wrong = [name for name in SCALARS if type(document.get(name, 0.0)) not in (int, float)]
    widths = document.get("widths", [])
    if not isinstance(widths, list) or not all(type(bits) is int for bits in widths):
        wrong.append("widths")
    if wrong:
        raise PolicyError(f"{path} has no numbers in {', '.join(wrong)}; calibrate again")
    return document


def _known_fields(folder: Path, document: dict[str, object], arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    names = {field.name for field in fields(Policy)}
    # Each from its own file: no array takes the place of a number.
    content: dict[str, Any] = {**_BEFORE, **{name: value for name, value in document.items() if name not in _ARRAYS}}
    content |= {name: value for name, value in arrays.items() if name in _ARRAYS}
    if "m_cal" in content:
        content.setdefault("feature_center", np.zeros((content["m_cal"].size, 3)))
    missing = sorted(names - set(content))
    if missing:
        raise PolicyError(f"the policy in {folder} lacks {', '.join(missing)}; calibrate again")
    unknown = sorted((set(document) | set(arrays)) - names - {"format_version"})
    if unknown:
        warnings.warn(f"the policy in {folder} has unknown fields {', '.join(unknown)[:200]}; ignored", stacklevel=3)
    return {name: content[name] for name in names}
