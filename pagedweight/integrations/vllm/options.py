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
    """

    bits: int | None = None
    widths: tuple[int, ...] = (2, 3, 4, 5, 6)
    codebooks: Mapping[int, str] = field(default_factory=dict)
    frame_bytes: int | None = None
    host_pinned_bytes: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "widths", normalized_widths(tuple(self.widths)))
        # Keys of a JSON object are strings.
        object.__setattr__(self, "codebooks", {int(width): name for width, name in dict(self.codebooks).items()})
        for name in ("bits", "frame_bytes", "host_pinned_bytes"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, Integral)):
                raise TypeError(f"{KEY}.{name} is {value!r}; give an int or leave it out")
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
