"""Greedy decoding forward by forward, each timed by events on the device's own clock."""

from __future__ import annotations

import time
from itertools import pairwise

import numpy as np
import torch
from transformers import PreTrainedModel

from pagedweight.runtime.controller_report import RuntimeSnapshot
from pagedweight.runtime.frames import OutOfFrames

RESERVED_STEPS = 16  # between two looks at what this process has asked of the driver, and at what the driver has left


class Mark:
    """A moment on the device's clock; on the CPU, where work ends with its call, the host's."""

    def __init__(self, device: torch.device) -> None:
        self.seconds = time.perf_counter()
        self._event = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()

    def wait(self) -> None:
        """Until the device has come here."""
        if self._event is not None:
            self._event.synchronize()

    def ms_until(self, other: Mark) -> float:
        if self._event is None:
            return 1e3 * (other.seconds - self.seconds)
        return self._event.elapsed_time(other._event)


class Decoding:
    """Greedy decoding of one batch, forward by forward. seen: the runtime before each forward."""

    def __init__(self, model: PreTrainedModel, batch: int, prompt_tokens: int) -> None:
        self.model, self.batch = model, batch
        self.cache = model.pagedweight.new_cache()
        self.seen: list[RuntimeSnapshot] = []
        self.reserved: list[int] = []
        self.driver_free: list[int] = []
        self._marks: list[Mark] = []
        self._generator = torch.Generator(model.device).manual_seed(0)
        self.skip(prompt_tokens)

    def skip(self, tokens: int) -> None:
        """Write so many random tokens of each sequence in one forward, which is not timed."""
        shape, device = (self.batch, tokens), self.model.device
        self._ids = torch.randint(self.model.config.vocab_size, shape, generator=self._generator, device=device)
        self._forward()

    @torch.no_grad()
    def _forward(self) -> None:
        output = self.model(input_ids=self._ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        self._ids = output.logits[:, -1].argmax(-1, keepdim=True)

    def run(self, steps: int) -> int:
        """At most so many forwards; fewer when the cache finds no more room. Returns how many."""
        for done in range(steps):
            self._mark()
            try:
                self._forward()
            except OutOfFrames:
                self._marks.pop()
                self.seen.pop()
                return done
        return steps

    def _mark(self) -> None:
        self._marks.append(Mark(self.model.device))
        self.seen.append(self.model.pagedweight.snapshot())
        if self.model.device.type == "cuda" and len(self.seen) % RESERVED_STEPS == 0:
            self.reserved.append(torch.cuda.memory_reserved())
            self.driver_free.append(torch.cuda.mem_get_info()[0])

    def milliseconds(self) -> np.ndarray:
        """(steps,), from the beginning of one forward to that of the next."""
        marks = [*self._marks, Mark(self.model.device)]
        if self.model.device.type == "cuda":
            torch.cuda.synchronize()
        return np.array([mark.ms_until(after) for mark, after in pairwise(marks)])
