"""Copy engines on the CPU and, where there is one, on a CUDA device with real streams."""

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pagedweight.runtime.frames import KV_OWNER, Arena
from pagedweight.runtime.transfer import FrameCopy, ImmediateEngine
from pagedweight.runtime.transfer_batch import DriverCopies, Pieces, _Attributes, pieces_of
from pagedweight.runtime.transfer_cuda import CudaEngine

FRAME_BYTES = 4096


def engines():
    return [pytest.param("cpu", id="immediate"), pytest.param("cuda", id="cuda", marks=pytest.mark.gpu)]


def make(device: str, frames: int = 256):
    arena = Arena(frames * FRAME_BYTES, FRAME_BYTES, device)
    arena.memory.fill_(0xA5)
    return arena, (ImmediateEngine if device == "cpu" else CudaEngine)(arena)


def random_page(frames: int, *, pinned: bool = False) -> torch.Tensor:
    page = torch.randint(0, 256, (frames * FRAME_BYTES,), dtype=torch.uint8)
    return page.pin_memory() if pinned else page


@pytest.mark.parametrize("device", engines())
@pytest.mark.parametrize("pinned", [False, pytest.param(True, marks=pytest.mark.gpu)])
def test_pages_go_in_and_out_bit_equal_and_touch_nothing_else(device, pinned):
    arena, engine = make(device)
    order = np.random.default_rng(0).permutation(256)
    # One run, a few short runs, and scattered frames in no order.
    places = [np.arange(10, 40), np.array([1, 2, 3, 50, 51, 60]), order[order > 60][:50]]
    pages = [random_page(len(place), pinned=pinned) for place in places]
    engine.copy_in([FrameCopy(*copy) for copy in zip(places, pages, strict=True)]).wait()
    rows = arena.rows.cpu()
    for place, page in zip(places, pages, strict=True):
        assert torch.equal(rows[torch.from_numpy(place)].view(-1), page)
    untouched = np.setdiff1d(np.arange(256), np.concatenate(places))
    assert (rows[torch.from_numpy(untouched)] == 0xA5).all()
    back = [torch.zeros_like(page) for page in pages]
    ticket = engine.copy_out([FrameCopy(*copy) for copy in zip(places, back, strict=True)])
    ticket.wait()
    assert ticket.done()
    assert all(torch.equal(a, b) for a, b in zip(pages, back, strict=True))
    engine.close()


@pytest.mark.parametrize("device", engines())
def test_write_now_is_seen_by_what_comes_next(device):
    arena, engine = make(device)
    table = random_page(3)
    engine.write_now([FrameCopy(np.arange(7, 10), table)])
    assert torch.equal(arena.view(7, 3).cpu(), table)
    engine.fence().wait()


@pytest.mark.parametrize("device", engines())
def test_frames_that_move_within_the_arena_keep_their_bytes(device):
    """Also where one moves to what another leaves."""
    arena, engine = make(device)
    arena.rows.copy_(torch.randint(0, 256, arena.rows.shape, dtype=torch.uint8))
    expected = arena.rows.clone()
    sources, targets = np.array([3, 7, 9, 200]), np.array([7, 20, 3, 0])
    expected[targets] = expected[sources]
    engine.relocate(sources, targets)
    assert torch.equal(arena.rows, expected)
    engine.close()


@given(
    st.lists(st.tuples(st.integers(0, 1), st.integers(0, 8)), min_size=1, max_size=12), st.sampled_from([64, 192, 4096])
)
def test_pieces_come_one_behind_the_other_joined_where_they_are_neighbours_and_cut_at_batches(picks, most_bytes):
    memories = [torch.randint(0, 256, (10 * 64,), dtype=torch.uint8) for _ in range(2)]
    hosts = [memories[which][at * 64 : (at + 1 + at % 2) * 64] for which, at in picks]
    places = np.array([(which, host.data_ptr(), len(host)) for (which, _), host in zip(picks, hosts, strict=True)])
    pieces = pieces_of(*places.T, most_bytes)
    target = np.zeros(sum(map(len, hosts)), dtype=np.uint8)
    for start, source, size in zip(*(values.tolist() for values in pieces), strict=True):
        assert start // most_bytes == (start + size - 1) // most_bytes
        ctypes.memmove(target.ctypes.data + start, source, size)
    assert target.tobytes() == torch.cat(hosts).numpy().tobytes()
    begins = set(np.cumsum([0, *map(len, hosts)]).tolist()) | set(range(0, len(target), most_bytes))
    assert set(pieces.start.tolist()) <= begins


def test_neighbours_of_one_memory_are_one_piece_and_those_of_two_are_not():
    together = pieces_of(np.array([5, 5, 5]), np.array([0, 64, 128]), np.array([64, 64, 64]), 4096)
    assert [values.tolist() for values in together] == [[0], [0], [192]]
    apart = pieces_of(np.array([5, 6, 6]), np.array([0, 64, 128]), np.array([64, 64, 64]), 4096)
    assert apart.size.tolist() == [64, 128]


@pytest.mark.gpu
def test_a_copy_waits_for_forwards_that_still_read_its_frames():
    arena, engine = make("cuda")
    before = arena.view(0, 8).clone()
    torch.cuda._sleep(200_000_000)
    read_late = arena.view(0, 8).clone()
    fence = engine.fence()
    ticket = engine.copy_in([FrameCopy(np.arange(8), random_page(8, pinned=True))])
    assert not fence.done()
    ticket.wait()
    assert fence.done()
    assert torch.equal(read_late, before)


@pytest.mark.gpu
def test_case_70_a_page_leaves_before_its_frames_are_used_again():
    arena, engine = make("cuda")
    page = random_page(16, pinned=True)
    frames = arena.allocate(16, KV_OWNER)
    engine.copy_in([FrameCopy(frames, page)]).wait()
    room = torch.zeros(16 * FRAME_BYTES, dtype=torch.uint8).pin_memory()
    engine.copy_out([FrameCopy(frames, room)]).wait()  # loads its kernels, which would wait for the stream
    room.zero_()
    with torch.cuda.stream(engine._spread_stream):
        torch.cuda._sleep(100_000_000)
    ticket = engine.copy_out([FrameCopy(frames, room)])
    assert not ticket.done()
    ticket.wait()  # what the pager does before the frames go to someone else
    arena.rows[torch.from_numpy(frames).cuda()] = 0xFF
    assert torch.equal(room, page)  # case 73: complete when the ticket says so


@pytest.mark.gpu
@pytest.mark.parametrize("batched", [True, False])
def test_pages_larger_than_the_staging_buffer_and_batches_that_overflow_it(batched, monkeypatch):
    monkeypatch.setattr("pagedweight.runtime.transfer_cuda._WRITING_BYTES", 16 * FRAME_BYTES)
    arena = Arena(256 * FRAME_BYTES, FRAME_BYTES, "cuda")
    engine = CudaEngine(arena, staging_bytes=16 * FRAME_BYTES, batched=batched)
    scattered = np.random.default_rng(1).permutation(256)
    places = [scattered[:40], scattered[40:52], scattered[52:66], scattered[66:70]]
    for write in (lambda copies: engine.copy_in(copies).wait(), engine.write_now):
        pages = [random_page(len(place)) for place in places]
        write([FrameCopy(*copy) for copy in zip(places, pages, strict=True)])
        back = [torch.zeros_like(page) for page in pages]
        engine.copy_out([FrameCopy(*copy) for copy in zip(places, back, strict=True)]).wait()
        assert all(torch.equal(a, b) for a, b in zip(pages, back, strict=True))


@pytest.mark.gpu
def test_tables_for_the_next_forward_are_read_by_it_and_not_by_the_last_one():
    """Many tables at once from page-locked and from pageable memory, again and again over the same frames."""
    arena, engine = make("cuda")
    frames = np.random.default_rng(2).permutation(256)[:120].reshape(60, 2)
    expected, seen = [], []
    for turn in range(6):
        tables = [random_page(2, pinned=(turn + at) % 3 > 0) for at in range(60)]
        engine.write_now([FrameCopy(*copy) for copy in zip(frames, tables, strict=True)])
        torch.cuda._sleep(5_000_000)
        seen.append(arena.rows[torch.from_numpy(frames.ravel()).pin_memory().cuda(non_blocking=True)])
        expected.append(torch.stack(tables).view(120, -1))
        del tables  # page-locked memory made for the copy may be handed out again only when it is over
    assert all(torch.equal(a.cpu(), b) for a, b in zip(seen, expected, strict=True))
    engine.close()


@pytest.mark.gpu
def test_staging_memory_that_was_another_tensors_waits_for_that_ones_last_reader():
    """Whichever copy makes it: here one out, which takes one half, before one in, which takes both."""
    _, engine = make("cuda", frames=4096)
    page, room = random_page(64, pinned=True), random_page(1, pinned=True)
    other = torch.full((2 * engine._staging.half_bytes,), 7, dtype=torch.uint8, device="cuda")
    address = other.data_ptr()
    torch.cuda._sleep(200_000_000)
    read_late = other.clone()
    del other
    engine.copy_out([FrameCopy(np.arange(1), room)])
    engine.copy_in([FrameCopy(np.arange(64), page)])
    assert min(half.address for half in engine._staging._halves) == address
    assert (read_late == 7).all()
    engine.close()


@pytest.mark.parametrize("device", engines())
def test_uploaded_values_are_what_the_next_kernel_reads_and_stay_so(device):
    """Behind a late kernel, and while the memory of values that nobody names any more goes to the next ones."""
    _, engine = make(device, frames=2**14)
    sums = []
    for turn in range(50):
        if device == "cuda":
            torch.cuda._sleep(200_000)
        sums.append(engine.upload(np.full(1000, turn)).sum())
    assert [int(total) for total in sums] == [1000 * turn for turn in range(50)]
    engine.close()


def test_attributes_are_laid_out_as_the_driver_has_them():
    assert ctypes.sizeof(_Attributes) == 24
    assert [getattr(_Attributes, name).offset for name, _ in _Attributes._fields_] == [0, 4, 12, 20]


class Driver:
    """Copies between addresses of the host at once, as the driver does to the device; counts its calls."""

    def __init__(self, *, has_batches: bool, result: int = 0) -> None:
        self.calls: list[int] = []
        self._result = result
        if has_batches:
            self.cuMemcpyBatchAsync = self._many

    def cuMemcpyHtoDAsync_v2(self, target, source, size, stream):
        self.calls.append(1)
        ctypes.memmove(target.value, source.value, size.value)
        return self._result

    def _many(self, targets, sources, sizes, count, attributes, first, attribute_count, failed, stream):
        self.calls.append(count.value)
        assert attribute_count.value == 1
        assert first._obj.value == 0
        assert attributes._obj.access_order == 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
        columns = [(ctypes.c_uint64 * count.value).from_address(array.value) for array in (targets, sources, sizes)]
        for target, source, size in zip(*columns, strict=True):
            ctypes.memmove(target, source, size)
        return self._result


@pytest.mark.parametrize(("has_batches", "batched"), [(True, True), (True, False), (False, True)])
def test_pieces_land_where_they_begin_in_one_call_where_the_driver_has_it(monkeypatch, has_batches, batched):
    driver = Driver(has_batches=has_batches)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    source = torch.arange(300, dtype=torch.int32).view(torch.uint8)
    target = torch.zeros(1004, dtype=torch.uint8)[4:]  # an address whose last bits are not 0
    start, begin, size = (np.array(column) for column in ([0, 500, 900], [640, 0, 40], [500, 400, 100]))
    pieces = Pieces(start, source.data_ptr() + begin, size)
    DriverCopies(batched=batched).copy_pieces(target.data_ptr(), pieces, SimpleNamespace(cuda_stream=7))
    expected = torch.cat([source[b : b + n] for b, n in zip(begin, size, strict=True)])
    assert torch.equal(target, expected)
    assert driver.calls == ([3] if has_batches and batched else [1, 1, 1])


@pytest.mark.parametrize("has_batches", [True, False])
def test_a_copy_that_the_driver_refuses_is_an_error(monkeypatch, has_batches):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver(has_batches=has_batches, result=700))
    host = torch.zeros(8, dtype=torch.uint8)
    pieces = Pieces(np.array([0]), np.array([host.data_ptr()]), np.array([4]))
    with pytest.raises(RuntimeError, match="error 700"):
        DriverCopies().copy_pieces(host.data_ptr() + 4, pieces, SimpleNamespace(cuda_stream=7))
