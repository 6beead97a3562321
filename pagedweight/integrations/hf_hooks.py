"""The hooks that a patched transformers model carries: everything that happens between two forwards."""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import NamedTuple, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from pagedweight.experts import TokenSlots

PADDING = -1
CACHE_NAMES = ("past_key_values", "cache")
# transformers' continuous batching: sequences one after the other in a single row, and where each of them begins.
PACKED = "cu_seq_lens_q"
# Where transformers cuts the memory of continuous batching into sectors, from 5.18 on.
SECTORS = "transformers.generation.continuous_batching.cache_allocators"


class ForwardCache(Protocol):
    """A KV cache in the arena that can say and take what a forward needs."""

    def missing_frames(self, batch: int, tokens: int) -> int: ...

    def frames_by_sequence(self, batch: int) -> list[int]: ...

    def reserve(self, batch: int, tokens: int) -> None: ...


class Boundary(Protocol):
    """What the hook calls: the patched model's runtime."""

    slots: TokenSlots
    max_requests: int
    kv: object | None
    parts: Sequence[object]

    def forward_cache(self, cache: object) -> ForwardCache | None:
        """The cache when it lives in this model's arena, None for any other; ValueError for another model's."""
        ...

    def boundary(self, pending_frames: int = 0, cached_frames: Sequence[int] = ()) -> None: ...

    def begin_requests(self, batch: int) -> None: ...


class Replacement(NamedTuple):
    """A method of one model that ours stands in for; before: what stood on the object itself, None for its class's."""

    name: str
    ours: Callable
    before: Callable | None

    @classmethod
    def put(cls, model: nn.Module, name: str, ours: Callable) -> Replacement:
        before = vars(model).get(name)
        setattr(model, name, ours)
        return cls(name, ours, before)

    def take_off(self, model: nn.Module) -> None:
        """What stood there before comes back, unless somebody has put another in our place."""
        if vars(model).get(self.name) is not self.ours:
            return
        delattr(model, self.name)
        if self.before is not None:
            setattr(model, self.name, self.before)


class Hooks(NamedTuple):
    """What a patched model carries; take_off() removes it."""

    forward: BeforeForward
    handle: RemovableHandle
    model: weakref.ref[nn.Module]
    replaced: Sequence[Replacement]

    def take_off(self) -> None:
        self.handle.remove()
        for replacement in self.replaced:
            replacement.take_off(self.model())


def add_boundary_hooks(model: nn.Module, runtime: Boundary, **methods: Callable) -> Hooks:
    """Call the boundary before every forward of the model, generate's and direct ones alike.

    methods: by name, what else stands in for the model's own until take_off().
    """
    before = BeforeForward(runtime, tuple(inspect.signature(model.forward).parameters))
    own = weakref.ref(model)  # the model holds what is made here: a reference back would keep its memory
    # One that somebody put on the model stays: the forward's own hook is enough.
    if hasattr(model, "prepare_inputs_for_generation") and "prepare_inputs_for_generation" not in vars(model):
        methods["prepare_inputs_for_generation"] = _preparing(own, before)
    replaced = [Replacement.put(model, name, ours) for name, ours in methods.items()]
    return Hooks(before, model.register_forward_pre_hook(before, with_kwargs=True), own, replaced)


def batching_methods(model: nn.Module, runtime: Boundary) -> dict[str, Callable]:
    """What stands in for the model's own methods so that continuous batching keeps its cache in the arena.

    Before 5.18 transformers does not let a cache live there: what it gives then has memory of its own, with a warning.
    """
    name = "init_continuous_batching"
    if not hasattr(model, name) or name in vars(model):
        return {}
    own, paged = weakref.ref(model), weakref.ref(runtime)

    def init_continuous_batching(*args: object, **kwargs: object) -> object:
        if len(paged().parts) > 1:
            raise ValueError(
                "continuous batching keeps its cache on one device and the model's layers are on several; use generate "
                "with model.pagedweight.new_cache(), or load the model on one device"
            )
        if find_spec(SECTORS) is not None:
            from pagedweight.integrations.hf_batching import manager_in_arena

            return manager_in_arena(own(), paged(), *args, **kwargs)
        if paged().kv is not None:
            warnings.warn(
                "this transformers' continuous batching has cache memory of its own, beside budget_bytes, and weights "
                "make no room in it; with transformers 5.18 or later it lives in the budget",
                stacklevel=2,
            )
        return type(own()).init_continuous_batching(own(), *args, **kwargs)

    return {name: init_continuous_batching}


def _preparing(model: weakref.ref[nn.Module], before: BeforeForward) -> Callable[..., dict]:
    """prepare_inputs_for_generation with the boundary after it: generate calls it once before every forward, in
    Python, also where the forward itself is compiled into one graph."""
    method = type(model()).prepare_inputs_for_generation

    def prepare(*args: object, **kwargs: object) -> dict:
        inputs = method(model(), *args, **kwargs)
        mask = kwargs.get("attention_mask")
        seen = inputs if mask is None else {**inputs, "attention_mask": mask}  # a static cache's mask is 4-D
        before.ahead((), seen, first=kwargs.get("is_first_iteration"))
        return inputs

    prepare.__signature__ = inspect.signature(model().prepare_inputs_for_generation)
    return prepare


@torch.compiler.assume_constant_result
def _exporting() -> bool:
    """Asked as ordinary Python: in what torch before 2.13 compiles, is_exporting() is true without any export."""
    return torch.compiler.is_exporting()


class BeforeForward:
    """A pre-hook, since that sees what only the forward knows: how many tokens are new, which are padding, the cache.

    positional: names of the forward's parameters, in order.
    A compiled model runs it too, as ordinary Python between graphs, unless `ahead` was called: then the forward is one
    graph. An exported model has no boundaries.
    """

    def __init__(self, runtime: Boundary, positional: Sequence[str]) -> None:
        self._runtime = runtime
        self._mask_second = positional[1:2] == ("attention_mask",)
        self._called_ahead = False
        self._ahead_of: weakref.ref[torch.Tensor] | None = None
        self._scheduled = False

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        ahead, self._called_ahead = self._called_ahead, False
        if ahead and not torch.compiler.is_compiling():
            # Inputs may have been prepared for a forward that never came.
            came = inputs_of(args, kwargs)
            ahead = came is None or self._ahead_of is None or self._ahead_of() is came
        if not ahead and not _exporting():
            self._boundary(args, kwargs)

    def ahead(self, args: tuple, kwargs: dict, first: bool | None = None) -> None:
        """The boundary of the coming forward, now. first: whether its sequences begin; by default the cache says it."""
        self._boundary(args, kwargs, first)
        self._called_ahead = True
        coming = inputs_of(args, kwargs)
        self._ahead_of = None if coming is None else weakref.ref(coming)

    def scheduled(self) -> None:
        """The boundary of the coming forward over packed sequences was called where they were put together."""
        self._scheduled = True

    @torch.compiler.disable(
        reason="pages move between graphs, not inside one: call model.pagedweight.before_forward(...) before a forward "
        "that is compiled with fullgraph"
    )
    def _boundary(self, args: tuple, kwargs: dict, first: bool | None = None) -> None:
        runtime = self._runtime
        shape = new_tokens(args, kwargs)
        if shape is None:
            runtime.slots.reset()
            runtime.boundary()
            return
        if kwargs.get(PACKED) is not None:
            set_packed_slots(runtime.slots, kwargs[PACKED], shape[1], runtime.max_requests)
            self._packed_boundary()
            return
        batch = shape[0]
        mask = kwargs.get("attention_mask", args[1] if self._mask_second and len(args) > 1 else None)
        set_slots(runtime.slots, mask, *shape, runtime.max_requests)
        if capturing():
            return
        given = next((kwargs[name] for name in CACHE_NAMES if kwargs.get(name) is not None), None)
        cache = runtime.forward_cache(given)
        if cache is None:
            runtime.boundary()
        else:
            runtime.boundary(cache.missing_frames(*shape), cache.frames_by_sequence(batch))
            cache.reserve(*shape)
        if first is None:
            first = given is None or not given.get_seq_length()
        if first:
            runtime.begin_requests(batch)

    def _packed_boundary(self) -> None:
        scheduled, self._scheduled = self._scheduled, False
        if not scheduled and not capturing():
            self._runtime.boundary()


def capturing() -> bool:
    """Whether a CUDA graph is being captured: then nothing may move, and no length may be asked of the device."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def inputs_of(args: tuple, kwargs: dict) -> torch.Tensor | None:
    """Ids or embeddings of a forward, None when it has neither."""
    ids = kwargs.get("input_ids", args[0] if args else None)
    ids = kwargs.get("inputs_embeds") if ids is None else ids
    return ids if isinstance(ids, torch.Tensor) else None


def new_tokens(args: tuple, kwargs: dict) -> tuple[int, int] | None:
    """(batch, new tokens per sequence) of a forward, None when it has neither ids nor embeddings.

    Ids are (B, T), embeddings (B, T, H), or (T, H) of one sequence.
    """
    given = inputs_of(args, kwargs)
    if given is None or given.dim() < 2:
        return None
    batch, tokens = given.shape[:2]
    return (1, batch) if given.dim() == 2 and given.is_floating_point() else (batch, tokens)


def set_slots(slots: TokenSlots, mask: object, batch: int, tokens: int, max_requests: int) -> None:
    """Every token in its batch row's request slot, except what a 2-D attention mask (B, past + T) says is padding."""
    masked = isinstance(mask, torch.Tensor) and mask.dim() == 2 and mask.shape[0] == batch
    if max_requests == 1 and not masked:
        slots.reset()
        return
    device = slots.view(1).device
    rows = (torch.arange(batch, dtype=torch.int32, device=device) % max_requests)[:, None].expand(batch, tokens)
    if masked:
        rows = torch.where(mask[:, -tokens:].to(device).bool(), rows, PADDING)
    slots.set(rows.reshape(-1))


def set_packed_slots(slots: TokenSlots, begins: torch.Tensor, tokens: int, max_requests: int) -> None:
    """Slots of sequences packed into a row of tokens; begins: (sequences + 1,), where each begins and the last ends.

    What comes after the last is padding.
    """
    position = torch.arange(tokens, device=begins.device)
    sequence = torch.searchsorted(begins[1:].contiguous(), position, right=True)
    slots.set(torch.where(position < begins[-1], sequence % max_requests, PADDING).to(torch.int32))
