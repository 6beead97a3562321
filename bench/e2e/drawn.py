"""A patched model of a real model's true shape whose weights are drawn, not loaded: planes and tables at random.

Host copies repeat one page-locked buffer, so the sizes, the places and the traffic are true and the contents are not.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedModel, Qwen2MoeConfig, Qwen2MoeForCausalLM

from pagedweight import RuntimeConfig
from pagedweight.discovery import ExpertsModule, find_experts
from pagedweight.kernels.device_order import plane_geometry
from pagedweight.layout import Layout
from pagedweight.patching import install
from pagedweight.patching_model import PagedModel
from pagedweight.patching_pages import layout_of, page_sizes
from pagedweight.patching_sizes import choose_sizes, kv_layers_of
from pagedweight.policy import Policy
from pagedweight.runtime.pages import PageSizes

WEIGHT_DEVIATION = 0.02


class RepeatedPages:
    """Host pages and tables that lie where real ones would, in a buffer that is used over and over."""

    def __init__(self, sizes: PageSizes, buffer_bytes: int, device: torch.device) -> None:
        self.sizes = sizes
        pages = np.repeat(sizes.plane_frames * sizes.frame_bytes, sizes.planes)
        tables = (sizes.table_frames * sizes.frame_bytes).ravel()
        buffer_bytes = max(buffer_bytes, 2 * int(max(pages.max(), tables.max())))
        self._page_at, self._table_at = _places(pages, buffer_bytes), _places(tables, buffer_bytes)
        bits = torch.randint(0, 256, (buffer_bytes,), dtype=torch.uint8, device=device)
        values = torch.empty(buffer_bytes // 2, dtype=torch.float16, device=device).normal_(0, WEIGHT_DEVIATION)
        self._pages, self._tables = (_on_host(drawn.view(torch.uint8)) for drawn in (bits, values))

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
        start = self._table_at[row * len(self.sizes.widths) + at]
        return self._tables[start : start + int(self.sizes.table_frames[row, at]) * self.sizes.frame_bytes]

    def close(self) -> None:
        return None


class DrawnStore(NamedTuple):
    """What a patched model needs of its pages' store."""

    layout: Layout
    host: RepeatedPages


class Drawn(NamedTuple):
    """A dense model without its experts, and what it takes to patch it, with any budget, as often as needed."""

    model: PreTrainedModel
    found: list[ExpertsModule]
    store: DrawnStore
    kv_layers: list
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


def emptied(model: PreTrainedModel, widths: tuple[int, ...], buffer_bytes: int) -> Drawn:
    """The same model with its experts' dense weights dropped, to be patched with drawn pages."""
    found = find_experts(model)
    dense_bytes = sum(p.numel() * p.element_size() for experts in found for p in experts.module.parameters())
    kv_layers = kv_layers_of(model, [model.get_submodule(experts.path) for experts in found])
    for experts in found:
        experts.drop_weights()
    layout = layout_of([experts.shape for experts in found], widths)
    frame_bytes = choose_sizes(layout, RuntimeConfig(), kv_layers).frame_bytes
    sizes = page_sizes(layout, [plane_geometry(n, k, frame_bytes) for n, k in layout.row_shapes()])
    return Drawn(
        model, found, DrawnStore(layout, RepeatedPages(sizes, buffer_bytes, model.device)), kv_layers, dense_bytes
    )


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
