"""A patched model of a real model's true shape whose weights are drawn, not loaded: planes and tables at random.

Host copies repeat one page-locked buffer, so the sizes, the places and the traffic are true and the contents are not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedModel, Qwen2MoeConfig, Qwen2MoeForCausalLM

from pagedweight import RuntimeConfig
from pagedweight.discovery import ExpertsModule, find_experts
from pagedweight.kernels.device_order import plane_geometry
from pagedweight.layout import Layout, table_form
from pagedweight.patching import install
from pagedweight.patching_model import PagedModel
from pagedweight.patching_pages import layout_of, page_sizes
from pagedweight.patching_sizes import KVLayers, choose_sizes, kv_layers_of
from pagedweight.policy import Policy
from pagedweight.runtime.pages import PageSizes

WEIGHT_DEVIATION = 0.02
TABLES_HELD = 128  # of each width on the host


class RepeatedPages:
    """Host pages and tables that lie where real ones would, in buffers that are used over and over."""

    def __init__(self, layout: Layout, sizes: PageSizes, buffer_bytes: int, device: torch.device) -> None:
        self.sizes = sizes
        pages = np.repeat(sizes.plane_frames * sizes.frame_bytes, sizes.planes)
        buffer_bytes = max(buffer_bytes, 2 * int(pages.max()))
        self._page_at = _places(pages, buffer_bytes)
        self._pages = _on_host(torch.randint(0, 256, (buffer_bytes,), dtype=torch.uint8, device=device))
        self._tables = [_tables_of(layout, sizes, width, device) for width in sizes.widths]

    @property
    def page_locked(self) -> torch.Tensor:
        """The buffer, for measuring what the bus gives."""
        return self._pages

    def has(self, row: int, plane: int) -> bool:
        return True

    def page(self, row: int, plane: int) -> torch.Tensor:
        start = self._page_at[row * self.sizes.planes + plane]
        return self._pages[start : start + int(self.sizes.plane_frames[row]) * self.sizes.frame_bytes]

    def table(self, row: int, width: int) -> torch.Tensor:
        at = self.sizes.widths.index(width)
        slots = self._tables[at]
        size = int(self.sizes.table_frames[row, at]) * self.sizes.frame_bytes
        start = slots.starts[row % len(slots.starts)]
        return slots.octets[start : start + size]

    def close(self) -> None:
        return None


class TableSlots(NamedTuple):
    """Tables of one width for the first so many rows, one slot behind the other in whole frames."""

    octets: torch.Tensor
    starts: list[int]


def _tables_of(layout: Layout, sizes: PageSizes, width: int, device: torch.device) -> TableSlots:
    held = min(layout.rows, TABLES_HELD)
    slots = sizes.table_frames[:held, sizes.widths.index(width)] * sizes.frame_bytes
    starts = (np.cumsum(slots) - slots).tolist()
    octets = torch.zeros(int(slots.sum()), dtype=torch.uint8, device=device)
    for start, (rows, _columns) in zip(starts, layout.row_shapes(), strict=False):
        table = drawn_table(layout.codebooks[width], width, rows, device)
        octets[start : start + table.numel()] = table
    return TableSlots(_on_host(octets), starts)


def drawn_table(codebook: str, width: int, rows: int, device: torch.device) -> torch.Tensor:
    """uint8 bytes of a linear-block's table whose values deviate by about WEIGHT_DEVIATION."""
    dtype, entries = table_form(codebook, width)
    if codebook == "lut8":
        octets = torch.randint(1, 128, (rows, entries), dtype=torch.uint8, device=device)
        scale = torch.full((rows, 1), WEIGHT_DEVIATION / 37, device=device)  # as the deviation of 1..127 around 64
        octets[:, -4:] = scale.view(torch.uint8)
        return octets.view(-1)
    table = torch.empty(rows, entries, dtype=dtype, device=device)
    if codebook == "lut16":
        table.normal_(0, WEIGHT_DEVIATION)
    elif codebook == "affine":  # a code's step, and the middle
        table[:] = torch.tensor([WEIGHT_DEVIATION * 12**0.5 / 2**width, 0.0])
    else:  # of -1 to 1: cubed, squared, as it is, and the middle
        table[:] = torch.tensor([0.0, 0.0, WEIGHT_DEVIATION * 3**0.5, 0.0])
    return table.view(-1).view(torch.uint8)


class DrawnStore(NamedTuple):
    """What a patched model needs of its pages' store."""

    layout: Layout
    host: RepeatedPages

    @property
    def sizes(self) -> PageSizes:
        return self.host.sizes


class Drawn(NamedTuple):
    """A dense model without its experts, and what it takes to patch it, with any budget, as often as needed."""

    model: PreTrainedModel
    found: list[ExpertsModule]
    store: DrawnStore
    kv_layers: KVLayers
    dense_bytes: int

    def patched(self, config: RuntimeConfig) -> PreTrainedModel:
        """The model under a runtime of its own; the one before it is closed."""
        layout = self.store.layout
        sizes = choose_sizes(layout, config, self.kv_layers)
        self._leave()
        device = self.model.device
        paged = PagedModel(self.store, sizes, drawn_policy(layout), config, device, self.model.config)
        install(self.model, paged, self.found)
        return self.model

    def with_pages(self, widths: tuple[int, ...], codebooks: Mapping[int, str], buffer_bytes: int) -> Drawn:
        """The same model with pages of other widths and codebooks, lut16 where none is given."""
        shapes = [experts.shape for experts in self.found]
        store = _drawn_store(layout_of(shapes, widths, codebooks), self.kv_layers, buffer_bytes, self.model.device)
        return self._replace(store=store)

    def resident_bytes(self) -> dict[int, int]:
        """Arena bytes of every linear-block at each width."""
        sums = self.store.host.sizes.resident_bytes().sum(axis=0)
        return dict(zip(self.store.layout.widths, sums.tolist(), strict=True))

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's keys and values in every layer."""
        return sum(shape.token_bytes for pair in self.kv_layers if pair is not None for shape in pair)

    def _leave(self) -> None:
        paged = getattr(self.model, "pagedweight", None)
        if paged is not None:
            paged.hooks.take_off()
            paged.close()
            for experts in self.found:
                self.model.set_submodule(experts.path, experts.module)
            del self.model.pagedweight, paged
            torch.cuda.empty_cache()


def draw(name: str, layers: int, widths: tuple[int, ...], device: str, buffer_bytes: int) -> Drawn:
    """The model's layers at random on the device, in bf16, its experts' dense weights dropped at once."""
    return emptied(dense_model(name, layers, device), widths, buffer_bytes)


def dense_model(name: str, layers: int, device: str) -> PreTrainedModel:
    """The model's layers at random on the device, in bf16, as transformers makes them."""
    make, config = SHAPES[name]
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = make(config(num_hidden_layers=layers, eos_token_id=None, pad_token_id=0)).eval()
    torch.set_default_dtype(default)
    return model


def emptied(
    model: PreTrainedModel,
    widths: tuple[int, ...],
    buffer_bytes: int,
    codebooks: Mapping[int, str] | None = None,
) -> Drawn:
    """The same model with its experts' dense weights dropped, to be patched with drawn pages.

    codebooks: lut16 where no other is given.
    """
    found = find_experts(model)
    dense_bytes = sum(p.numel() * p.element_size() for experts in found for p in experts.module.parameters())
    kv_layers = kv_layers_of(model, [model.get_submodule(experts.path) for experts in found])
    for experts in found:
        experts.drop_weights()
    layout = layout_of([experts.shape for experts in found], widths, codebooks)
    return Drawn(model, found, _drawn_store(layout, kv_layers, buffer_bytes, model.device), kv_layers, dense_bytes)


def _drawn_store(layout: Layout, kv_layers: KVLayers, buffer_bytes: int, device: torch.device) -> DrawnStore:
    frame_bytes = choose_sizes(layout, RuntimeConfig(), kv_layers).frame_bytes
    sizes = page_sizes(layout, [plane_geometry(n, k, frame_bytes) for n, k in layout.row_shapes()])
    return DrawnStore(layout, RepeatedPages(layout, sizes, buffer_bytes, device))


def drawn_policy(layout: Layout) -> Policy:
    """Damage that falls with width, different for every row; every expert is routed to equally."""
    rng = np.random.default_rng(0)
    s_bar = rng.uniform(0.5, 2.0, (layout.rows, 1)) * 4.0 ** -np.array(layout.widths)
    return Policy.from_sensitivity(layout, s_bar, np.ones(layout.rows))


def _places(sizes: np.ndarray, buffer_bytes: int) -> np.ndarray:
    """Where each piece starts, one behind the other, from the buffer's beginning again when its end is reached."""
    starts = np.cumsum(sizes) - sizes
    return starts % (buffer_bytes - int(sizes.max())) // 128 * 128


def _on_host(drawn: torch.Tensor) -> torch.Tensor:
    if drawn.device.type == "cpu":
        return drawn
    return torch.empty(drawn.shape, dtype=drawn.dtype, pin_memory=True).copy_(drawn)


def tiny_qwen(**options: object) -> Qwen2MoeConfig:
    """For a trial on the CPU."""
    return Qwen2MoeConfig(
        vocab_size=256, hidden_size=64, moe_intermediate_size=64, shared_expert_intermediate_size=128,
        num_attention_heads=4, num_key_value_heads=4, num_experts=8, **options,
    )  # fmt: skip


# What the published models are: the configuration classes' own defaults.
SHAPES = {
    "qwen": (Qwen2MoeForCausalLM, Qwen2MoeConfig),
    "mixtral": (MixtralForCausalLM, MixtralConfig),
    "tiny": (Qwen2MoeForCausalLM, tiny_qwen),
}
