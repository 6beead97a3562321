"""Mixed traffic on one patched model, step by step, and what must hold before every forward of it.

Sequences of different lengths come, decode and end or are cut off; widths are set; memory is taken by others and given
back. Before each forward what its kernels will read is compared, byte for byte, with what the host has.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from pagedweight.experts import PagedExperts
from pagedweight.integrations.kv_pool import FrameHoldings
from pagedweight.runtime.frames import OutOfFrames

LIVE_REQUESTS = 4
LONGEST_PROMPT, LONGEST_ANSWER = 160, 120
PROBE_TOKENS, PROBE_STEPS = (1, 37, 190), 4


class Truth:
    """Every page and table of a model as the host has them, copied to its device."""

    def __init__(self, model: PreTrainedModel) -> None:
        paged = model.pagedweight
        sizes, host, device = paged.store.sizes, paged.store.host, paged.arena.memory.device
        self._paged, self._sizes = paged, sizes
        self._seen = next(module for module in model.modules() if isinstance(module, PagedExperts)).tables
        rows, most = paged.layout.rows, int(sizes.plane_frames.max())
        self._pages = torch.zeros(rows, sizes.planes, most, sizes.frame_bytes, dtype=torch.uint8)
        for row in range(rows):
            for plane in range(sizes.planes):
                page = host.page(row, plane).view(-1, sizes.frame_bytes)
                self._pages[row, plane, : len(page)] = page
        self._pages = self._pages.to(device)
        self._tables = {
            (row, bits): host.table(row, bits).to(device) for row in range(rows) for bits in paged.layout.widths
        }

    def check(self) -> None:
        """Assert that kernels would read the committed widths, the right pages and the right tables, of every row."""
        paged, sizes, seen = self._paged, self._sizes, self._seen
        bits = paged.snapshot().bits
        assert (seen.bits.cpu().numpy() == bits).all(), (seen.bits, bits)
        planes, frames = np.arange(sizes.planes), np.arange(self._pages.shape[2])
        used = (planes < bits[:, None])[:, :, None] & (frames < sizes.plane_frames[:, None])[:, None, :]
        used = torch.from_numpy(used).to(seen.bits.device)
        offset = seen.frame_address[used] - paged.arena.memory.data_ptr()
        assert (offset % sizes.frame_bytes == 0).all()
        assert torch.equal(paged.arena.rows[offset // sizes.frame_bytes], self._pages[used])
        starts = (seen.table_address - paged.arena.memory.data_ptr()).tolist()
        tables = [self._tables[row, width] for row, width in enumerate(bits.tolist())]
        held = [paged.arena.memory[start : start + len(table)] for start, table in zip(starts, tables, strict=True)]
        assert torch.equal(torch.cat(held), torch.cat(tables))
        paged.check()


class Cancelled(Exception):
    """Whoever asked has gone away."""


class CutOff(StoppingCriteria):
    """Raises Cancelled once so many tokens are there, in the midst of generate()."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        if input_ids.shape[1] >= self._length:
            raise Cancelled
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


class Request:
    """A batch that is answered greedily, one forward at a time, in a cache of its own."""

    def __init__(self, model: PreTrainedModel, prompt: torch.Tensor, answer_tokens: int) -> None:
        self._model = model
        self.cache = model.pagedweight.new_cache()
        self._ids = prompt
        self.left = answer_tokens

    @torch.no_grad()
    def forward(self) -> None:
        logits = self._model(input_ids=self._ids, past_key_values=self.cache, logits_to_keep=1).logits
        self._ids = logits[:, -1].argmax(-1, keepdim=True)
        self.left -= 1


class Traffic:
    """Requests and disturbances on a patched model, drawn from rng. counts: what has happened, by name."""

    def __init__(self, model: PreTrainedModel, rng: np.random.Generator, counts: Counter[str]) -> None:
        self.model, self.paged, self.counts = model, model.pagedweight, counts
        self._rng = rng
        self._live: list[Request] = []
        self._others: list[FrameHoldings] = []
        truth = Truth(model)

        def before(*_: object) -> None:
            truth.check()
            counts["forwards"] += 1

        self._hook = model.register_forward_pre_hook(before)

    def step(self) -> None:
        """One forward of one request, or something that happens between two."""
        actions = (self._begin, self._cut_off, self._set_bits, self._others_take, self._others_give, self._generate)
        chances = (0.12, 0.02, 0.01, 0.02, 0.03, 0.003)
        drawn = self._rng.choice(len(actions) + 1, p=[*chances, 1 - sum(chances)])
        (*actions, self._forward)[drawn]()

    def end(self) -> None:
        """Every request ends and others give their memory back."""
        while self._live:
            self._live.pop().cache.release()
        while self._others:
            self._others.pop().give_all()
        self.paged.boundary()

    def leave(self) -> None:
        """The model carries no trace of this traffic."""
        self.end()
        self._hook.remove()

    def answers(self, bits: int) -> str | None:
        """SHA-256 of the logits of fixed prompts, some steps each, at a fixed width; None when the arena is too small.

        At the floor width the sequences live in the arena.
        """
        digest = hashlib.sha256()
        generator = torch.Generator().manual_seed(7)
        self.end()
        with suppress(OutOfFrames), self.paged.held_at(bits), torch.no_grad():
            for tokens in PROBE_TOKENS:
                ids = torch.randint(self.model.config.vocab_size, (2, tokens), generator=generator)
                ids = ids.to(self.model.device)
                at_floor = bits == self.paged.layout.floor_width
                cache = self.paged.new_cache() if at_floor else DynamicCache(config=self.model.config)
                for _ in range(PROBE_STEPS):
                    logits = self.model(input_ids=ids, past_key_values=cache).logits
                    digest.update(logits.float().cpu().numpy().tobytes())
                    ids = logits[:, -1].argmax(-1, keepdim=True)
            self.counts["answers"] += 1
            return digest.hexdigest()
        return None

    def _prompt(self, longest: int = LONGEST_PROMPT) -> torch.Tensor:
        shape = int(self._rng.integers(1, 4)), int(self._rng.integers(1, longest + 1))
        drawn = self._rng.integers(3, self.model.config.vocab_size, shape)
        return torch.from_numpy(drawn).to(self.model.device)

    def _begin(self) -> None:
        if len(self._live) < LIVE_REQUESTS:
            answer_tokens = int(self._rng.integers(1, LONGEST_ANSWER + 1))
            self._live.append(Request(self.model, self._prompt(), answer_tokens))
            self.counts["requests"] += 1

    def _forward(self) -> None:
        if not self._live:
            self.paged.boundary()
            return
        at = int(self._rng.integers(len(self._live)))
        request = self._live[at]
        try:
            request.forward()
        except OutOfFrames:
            self.counts["refused"] += 1
            request.left = 0
        else:
            self.counts["finished"] += request.left == 0
        if request.left == 0:
            self._live.pop(at).cache.release()

    def _cut_off(self) -> None:
        """Half of them tell the cache, the others just drop it."""
        if self._live:
            request = self._live.pop(int(self._rng.integers(len(self._live))))
            self.counts["cut off"] += 1
            if self._rng.random() < 0.5:
                request.cache.release()

    def _set_bits(self) -> None:
        widths, rows = self.paged.layout.widths, self.paged.layout.rows
        bits = self._rng.choice(widths, rows) if self._rng.random() < 0.5 else int(self._rng.choice(widths))
        try:
            self.paged.set_bits(bits)
        except OutOfFrames:
            self.counts["widths that did not fit"] += 1
        self.counts["widths set"] += 1

    def _others_take(self) -> None:
        """Memory for weights and requests becomes less."""
        most = self.paged.kv.obtainable_bytes // self.paged.arena.frame_bytes
        if len(self._others) < 3 and most > 1:
            self._others.append(self.paged.kv.new_holdings())
            self.paged.kv.take(self._others[-1], int(self._rng.integers(1, 1 + most // 2)))
            self.counts["taken by others"] += 1

    def _others_give(self) -> None:
        if self._others:
            self._others.pop(int(self._rng.integers(len(self._others)))).give_all()

    def _generate(self) -> None:
        """transformers' own loop: greedy, sampling, beams, or one that ends in an exception."""
        prompt = self._prompt(60)
        way = [{}, {"do_sample": True}, {"num_beams": 2}, {"cut_off": True}][self._rng.integers(4)]
        stop = [CutOff(prompt.shape[1] + 3)] if way.pop("cut_off", False) else []
        with suppress(OutOfFrames, Cancelled):
            self.model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                past_key_values=self.paged.new_cache(),
                max_new_tokens=8,
                stopping_criteria=StoppingCriteriaList(stop),
                **{"do_sample": False, **way},
            )
        self.counts["generate()"] += 1
