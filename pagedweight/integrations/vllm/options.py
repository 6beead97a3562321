"""What a user may choose: additional_config={"pagedweight": {...}}, on the command line --additional-config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from numbers import Integral

from pagedweight.layout import CODEBOOKS, normalized_widths
from pagedweight.runtime.config import FRAME_ALIGNMENT_BYTES

KEY = "pagedweight"  # also the name of the quantization method


@dataclass(frozen=True, slots=True)
class ServingOptions:
    """Choices beyond vLLM's own; checked at construction.

    bits: hold every linear-block at this width, all planes as plain weights; None lets widths follow the KV cache.
    widths, codebooks: for experts quantized or drawn while loading; a checkpoint brings its own. codebooks by width,
        lut16 where not given.
    frame_bytes: bytes of a frame; None chooses by the planes' shapes and the KV blocks.
    host_pinned_bytes: page-locked host memory for page copies; None locks all of it.
    offload_free_blocks: weights give KV blocks up when this many or fewer would be free after the coming step.
    reload_free_blocks: so many are free when they have; they take blocks back only while more than this stay free.
    reload_blocks: most blocks that are loaded at a time.
    settle_steps: steps from the start of a load to its use, the same on every rank.
    min_dwell_steps: steps for which a changed row keeps its width before it may rise.
    plan_period_steps: steps between looks for something to raise after one that found nothing.
    statistics_period_steps: steps between readings of the routing statistics; four times as many while every width is
        the parent's.
    statistics_slots: requests that the statistics tell apart; where more run, some share a slot.
    prefix_cache_by_precision: requests reuse cached prefixes only of requests that came at the same precision.
    """

    bits: int | None = None
    widths: tuple[int, ...] = (2, 3, 4, 5, 6)
    codebooks: Mapping[int, str] = field(default_factory=dict)
    frame_bytes: int | None = None
    host_pinned_bytes: int | None = None
    offload_free_blocks: int = 8
    reload_free_blocks: int = 32
    reload_blocks: int = 16
    settle_steps: int = 2
    min_dwell_steps: int = 4
    plan_period_steps: int = 8
    statistics_period_steps: int = 16
    statistics_slots: int = 64
    prefix_cache_by_precision: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.widths, list | tuple) or not all(type(width) is int for width in self.widths):
            raise TypeError(f"{KEY}.widths is {self.widths!r}; give a list of whole numbers")
        if not isinstance(self.codebooks, Mapping) or not all(str(width).isdecimal() for width in self.codebooks):
            raise TypeError(f"{KEY}.codebooks is {self.codebooks!r}; give an object of names by width")
        object.__setattr__(self, "widths", normalized_widths(tuple(self.widths)))
        # Keys of a JSON object are strings.
        object.__setattr__(self, "codebooks", {int(width): name for width, name in self.codebooks.items()})
        for option in fields(self):
            value = getattr(self, option.name)
            if option.type == "bool" and not isinstance(value, bool):
                raise TypeError(f"{KEY}.{option.name} is {value!r}; give true or false")
            if option.type.startswith("int"):
                _check_number(option.name, value, optional=option.type != "int")
        if self.reload_free_blocks <= self.offload_free_blocks:
            raise ValueError(
                f"{KEY}.reload_free_blocks is {self.reload_free_blocks} and offload_free_blocks "
                f"{self.offload_free_blocks}; reload must be the larger, or blocks would move back and forth"
            )
        for width, codebook in self.codebooks.items():
            if width not in self.widths or codebook not in CODEBOOKS:
                raise ValueError(
                    f"{KEY}.codebooks has {width}: {codebook!r}; give one of {', '.join(CODEBOOKS)} for widths among "
                    f"{self.widths}"
                )
        if self.frame_bytes is not None and (self.frame_bytes < 1 or self.frame_bytes % FRAME_ALIGNMENT_BYTES):
            raise ValueError(f"{KEY}.frame_bytes is {self.frame_bytes}; give a multiple of {FRAME_ALIGNMENT_BYTES}")

    @classmethod
    def of(cls, additional_config: object) -> ServingOptions:
        """The options among vLLM's additional_config; ValueError for a name that is none."""
        given = additional_config.get(KEY, {}) if isinstance(additional_config, Mapping) else {}
        if not isinstance(given, Mapping):
            raise ValueError(f"additional_config[{KEY!r}] is {given!r}; give an object of options")
        unknown = sorted(set(given) - {option.name for option in fields(cls)})
        if unknown:
            known = ", ".join(option.name for option in fields(cls))
            raise ValueError(f"{KEY} has no option {', '.join(unknown)}; the options are {known}")
        return cls(**given)


def _check_number(name: str, value: object, *, optional: bool) -> None:
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{KEY}.{name} is {value!r}; give an int or leave it out")
    least = 1 if name.endswith("_steps") or name in ("reload_blocks", "statistics_slots") else 0
    if value < least:
        raise ValueError(f"{KEY}.{name} is {value}; it must be at least {least}")
