"""The drop-in for a model's routed experts: holds where its planes are, calls the kernels, knows no runtime."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

import torch
from torch import nn

from pagedweight.kernels import ops
from pagedweight.kernels.call import Call
from pagedweight.kernels.launch import join_codebooks
from pagedweight.layout import BlockTables, MoeLayer, RoutingStats

BIASES = ("gate_up_bias", "down_bias")


class TokenSlots:
    """Which request slot each token of the next forward belongs to; all tokens are in slot 0 until told otherwise.

    One object serves all layers of a model. The buffer keeps its address while batches stay within `capacity`, so a
    captured graph sees what `set` wrote.
    """

    def __init__(self, capacity: int = 4096, device: torch.device | str = "cpu") -> None:
        if capacity < 1:
            raise ValueError(f"capacity is {capacity}; give at least 1 token")
        self._buffer = _slot_zeros(capacity, device)

    def set(self, slots: torch.Tensor) -> None:
        """Slots of the first tokens, (n,) integers, -1 for padding; tokens after them count as padding."""
        if slots.dim() != 1 or slots.is_floating_point():
            raise ValueError(f"slots is {slots.dtype} {tuple(slots.shape)}; give one integer per token")
        self.view(len(slots))
        self._buffer[: len(slots)].copy_(slots)
        self._buffer[len(slots) :].fill_(-1)

    def mark(self, tokens: int) -> None:
        """The first tokens are in slot 0, those after them are padding."""
        self._buffer[:tokens].zero_()
        self._buffer[tokens:].fill_(-1)

    def reset(self) -> None:
        """Every token in slot 0."""
        self._buffer.zero_()

    def view(self, tokens: int) -> torch.Tensor:
        """int32 (tokens,) slots of the next forward; grows the buffer when it is too short."""
        held = len(self._buffer)
        if tokens > held:
            grown = _slot_zeros(max(tokens, 2 * held), self._buffer.device)
            grown[:held].copy_(self._buffer)
            grown[held:].copy_(self._buffer[-1:].expand(len(grown) - held))
            self._buffer = grown
        return self._buffer[:tokens]


class PagedExperts(nn.Module):
    """Routed experts of one MoE layer, read through the page table at their committed widths.

    Planes live in the runtime's arena, so `.to()`, `.half()` and `state_dict()` leave them alone, and the output has
    the dtype of the input. Biases, where a model has them, are small and stay ordinary parameters: gate_up_bias
    (E, 2I), gate first, or (E, I) without a gate, and down_bias (E, H).
    """

    gate_up_bias: nn.Parameter | None
    down_bias: nn.Parameter | None
    _dense: torch.Tensor

    def __init__(
        self,
        shape: MoeLayer,
        layer_index: int,
        first_row: int,
        tables: BlockTables,
        stats: RoutingStats,
        slots: TokenSlots,
        *,
        frame_bytes: int,
        widths: tuple[int, ...],
        codebooks: Mapping[int, str],
        biases: Mapping[str, torch.Tensor] | None = None,
        dense_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        for name in BIASES:
            bias = (biases or {}).get(name)
            self.register_parameter(name, None if bias is None else nn.Parameter(bias, requires_grad=False))
        # Empty: it follows .half() and .to(), so that one can tell what dense weights would be by now.
        self.register_buffer("_dense", torch.empty(0, dtype=dense_dtype), persistent=False)
        self.shape = shape
        self.layer_index = layer_index
        self.first_row = first_row
        self.tables = tables
        self.stats = stats
        self.slots = slots
        self.frame_bytes = frame_bytes
        self.widths = widths
        self.codebooks = join_codebooks(codebooks, widths)

    @property
    def num_experts(self) -> int:
        return self.shape.experts

    @property
    def dense_dtype(self) -> torch.dtype:
        """What the dtype of dense weights in this place would be."""
        return self._dense.dtype

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """(T, H) hidden states, or (..., H) with T tokens in all, (T, A) ids and weights, to their shape and dtype."""
        out = ops.fused_moe(*self.call(hidden_states, top_k_index, top_k_weights))
        return out.view(hidden_states.shape)

    def call(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> Call:
        """What `forward` asks of the kernels."""
        if hidden_states.shape[-1] != self.shape.hidden:
            raise ValueError(
                f"hidden_states is {tuple(hidden_states.shape)}; this layer takes (T, {self.shape.hidden})"
            )
        if hidden_states.device != self.tables.memory.device:
            raise ValueError(
                f"hidden_states is on {hidden_states.device} and these experts' pages on {self.tables.memory.device}, "
                "where .to() leaves them; move the model before it is patched, or load it there (device_map)"
            )
        tokens = hidden_states.reshape(-1, self.shape.hidden)
        return Call(
            tokens,
            top_k_index,
            top_k_weights,
            self.slots.view(tokens.shape[0]),
            *self.tables,
            *self.stats,
            self.layer_index,
            self.first_row,
            self.shape.experts,
            self.shape.intermediate,
            self.frame_bytes,
            self.shape.activation,
            list(self.widths),
            self.codebooks,
            self.shape.gated,
            self.shape.limit,
            self.gate_up_bias,
            self.down_bias,
        )

    def extra_repr(self) -> str:
        return (
            f"layer={self.shape.layer}, experts={self.shape.experts}, hidden={self.shape.hidden}, "
            f"intermediate={self.shape.intermediate}, activation={self.shape.activation}, widths={self.widths}"
        )

    def __deepcopy__(self, memo: dict[int, object]) -> NoReturn:
        raise _not_copyable()

    def __getstate__(self) -> NoReturn:
        raise _not_copyable()


def _slot_zeros(capacity: int, device: torch.device | str) -> torch.Tensor:
    # An ordinary tensor even when born inside inference_mode, so that it can be written outside.
    with torch.inference_mode(False):
        return torch.zeros(capacity, dtype=torch.int32, device=device)


def _not_copyable() -> TypeError:
    return TypeError(
        "paged experts cannot be copied or pickled: their weights live in the runtime's memory; "
        "use pagedweight.save and pagedweight.load, or unpatch the model first"
    )
