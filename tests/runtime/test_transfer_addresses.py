"""What the copy engine hands to the CUDA driver, as plain addresses, on a machine without CUDA.

The driver believes every address. Here each piece must lie in a host page that is alive and in staging memory that is
the engine's, and together they must bring every byte to its frame.
"""

import contextlib
import ctypes
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pagedweight.runtime import transfer_cuda, transfer_staging
from pagedweight.runtime.frames import Arena
from pagedweight.runtime.transfer import FrameCopy
from pagedweight.runtime.transfer_cuda import CudaEngine

FRAME_BYTES = 128
FRAMES = 300


class Moment:
    """A stream or an event of a device on which everything is over when it is launched."""

    def __init__(self, *_args, **_options):
        pass

    def query(self):
        return True

    def elapsed_time(self, _later):
        return 1.0

    def record(self, *_stream):
        pass

    wait_event = wait_stream = record

    def synchronize(self):
        pass


class Driver:
    """Copies by address at once, and remembers what it was asked for."""

    def __init__(self, **_options):
        self.asked: list[tuple[int, int, int]] = []

    def copy_pieces(self, target_address, pieces, _stream):
        assert len(pieces.start) > 0
        for start, source, size in zip(*(values.tolist() for values in pieces), strict=True):
            self.asked.append((target_address + start, source, size))
            ctypes.memmove(target_address + start, source, size)


@contextlib.contextmanager
def without_cuda():
    """What the engine needs of torch.cuda; yields weak references to page-locked memory made meanwhile."""
    made = []

    def pin_memory(tensor):
        made.append(weakref.ref(copy := tensor.clone()))
        return copy

    def nothing(_stream):
        return contextlib.nullcontext()

    with pytest.MonkeyPatch.context() as patch:
        for name, stand_in in {
            "Stream": Moment,
            "Event": Moment,
            "current_stream": Moment,
            "device": nothing,
            "stream": nothing,
        }.items():
            patch.setattr(torch.cuda, name, stand_in)
        patch.setattr(torch.Tensor, "pin_memory", pin_memory)
        patch.setattr(torch.Tensor, "is_pinned", lambda tensor: tensor.untyped_storage().nbytes() > 10**5)
        patch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
        patch.setattr(transfer_cuda, "DriverCopies", Driver)
        yield made


def inside(piece: tuple[int, int], memories: list[tuple[int, int]]) -> bool:
    start, size = piece
    return any(low <= start and start + size <= low + held for low, held in memories)


# Frames of a page, and where it lies: in one of two chunks of page-locked memory, or in pageable memory of its own.
pages = st.lists(st.tuples(st.integers(1, 25), st.sampled_from([0, 1, None])), min_size=1, max_size=11)


@given(pages, st.integers(1, 40), st.integers(1, 3), st.booleans(), st.randoms(use_true_random=False))
def test_every_piece_lies_in_a_page_and_in_staging_and_every_byte_arrives(picked, half_frames, streams, now, random):
    chunks = [torch.randint(0, 256, (900 * FRAME_BYTES,), dtype=torch.uint8) for _ in range(2)]
    hosts = []
    for count, where in picked:
        size = count * FRAME_BYTES
        at = random.randrange(0, 875) * FRAME_BYTES
        page = torch.randint(0, 256, (size,), dtype=torch.uint8)
        hosts.append(page if where is None else chunks[where][at : at + size])
    places = np.split(np.array(random.sample(range(FRAMES), FRAMES)), np.cumsum([count for count, _ in picked]))[:-1]
    with without_cuda() as made, pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfer_staging, "_LEAST_HALVES", 1)
        patch.setattr(transfer_cuda, "_WRITING_BYTES", half_frames * FRAME_BYTES)
        arena = Arena(FRAMES * FRAME_BYTES, FRAME_BYTES)
        arena.memory.fill_(0xA5)
        engine = CudaEngine(arena, half_frames * FRAME_BYTES, streams)
        before = len(made)
        copies = [FrameCopy(*copy) for copy in zip(places, hosts, strict=True)]
        ticket = engine.write_now(copies) if now else engine.copy_in(copies)
        staging = engine._writing if now else engine._staging
        halves = [(half.address, half.rows.numel() * half.rows.element_size()) for half in staging._halves]
        alive = [page for page in (ref() for ref in made[before:]) if page is not None]
        locked = [(memory.data_ptr(), memory.numel()) for memory in [*chunks, *alive]]
        for target, source, size in engine._copies.asked:
            assert inside((target, size), halves)
            assert inside((source, size), locked)
        del alive
        assert sum(size for _, _, size in engine._copies.asked) == sum(map(len, hosts))
        for place, host in zip(places, hosts, strict=True):
            assert torch.equal(arena.rows[torch.from_numpy(place)].view(-1), host)
        rest = np.setdiff1d(np.arange(FRAMES), np.concatenate(places))
        assert (arena.rows[torch.from_numpy(rest)] == 0xA5).all()
        del ticket, engine
        assert not [ref for ref in made[before:] if ref() is not None]  # nothing is kept for ever


def test_buffers_made_inside_inference_mode_serve_outside():
    with without_cuda():
        arena = Arena(FRAMES * FRAME_BYTES, FRAME_BYTES)
        engine = CudaEngine(arena)
        page = torch.arange(2 * FRAME_BYTES).to(torch.uint8)
        copy, room = FrameCopy(np.array([7, 3]), page), torch.zeros_like(page)
        with torch.inference_mode():
            engine.copy_in([copy])
            engine.write_now([copy])
        for size in (1, 10_000):
            assert engine.upload(np.arange(size)).tolist() == list(range(size))
        engine.write_now([copy])
        engine.copy_out([FrameCopy(copy.frames, room)])
        assert torch.equal(room, page)
