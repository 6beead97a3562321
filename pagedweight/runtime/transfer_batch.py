"""Many host-to-device copies in one call of the CUDA driver.

A copy launched on its own costs the host some 10 us, as long as half a MiB takes to cross the bus; in a batch it costs
a tenth of that, and the bus is busy nearly all the time.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import numpy as np
import torch


class Pieces(NamedTuple):
    """Copies as arrays (n,): where in the staged bytes each begins, its host address, its bytes. All int64."""

    start: np.ndarray
    source: np.ndarray
    size: np.ndarray


def pieces_of(memory: np.ndarray, source: np.ndarray, size: np.ndarray, most_bytes: int) -> Pieces:
    """Host pieces one behind the other: those that are neighbours in one memory joined, then cut at every multiple of
    most_bytes.

    memory: (n,) which allocation a piece lies in. source, size: (n,) addresses and bytes, all int64.
    """
    ends = np.cumsum(size)
    apart = (memory[1:] != memory[:-1]) | (source[1:] != source[:-1] + size[:-1])
    first = np.flatnonzero(np.concatenate([[True], apart]))
    joined = ends[first] - size[first]
    start = np.union1d(joined, np.arange(0, ends[-1], most_bytes))
    within = np.searchsorted(joined, start, side="right") - 1
    return Pieces(start, source[first][within] + start - joined[within], np.diff(start, append=ends[-1]))


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes: the order of source accesses, two location hints, flags."""

    _fields_ = (
        ("access_order", ctypes.c_int),
        ("source_hint", ctypes.c_int * 2),
        ("target_hint", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


_IN_STREAM_ORDER = 1


class DriverCopies:
    """Copies from page-locked host memory to the device. Whoever launches them keeps the memory until they are over.

    batched: many in one call, from CUDA 12.8 on.
    """

    def __init__(self, *, batched: bool = True) -> None:
        driver = ctypes.CDLL("libcuda.so.1")
        self._one = driver.cuMemcpyHtoDAsync_v2
        self._many = getattr(driver, "cuMemcpyBatchAsync", None) if batched else None

    def copy_pieces(self, target_address: int, pieces: Pieces, stream: torch.cuda.Stream) -> None:
        """Copy each piece to its start from target_address on, on a stream other than the default one. Raises
        RuntimeError when the driver refuses.
        """
        handle = ctypes.c_void_p(stream.cuda_stream)
        target = pieces.start + target_address
        if self._many is None:
            for place, source, size in zip(target.tolist(), pieces.source.tolist(), pieces.size.tolist(), strict=True):
                _check(self._one(ctypes.c_uint64(place), ctypes.c_void_p(source), ctypes.c_size_t(size), handle))
            return
        failed, first = ctypes.c_size_t(), ctypes.c_size_t(0)
        attributes = _Attributes(access_order=_IN_STREAM_ORDER)
        # Kept by name until the call returns: the driver reads the arrays then, and not later.
        arrays = [np.ascontiguousarray(values, dtype=np.uint64) for values in (target, pieces.source, pieces.size)]
        _check(
            self._many(
                *(ctypes.c_void_p(array.ctypes.data) for array in arrays),
                ctypes.c_size_t(len(target)),
                ctypes.byref(attributes),
                ctypes.byref(first),
                ctypes.c_size_t(1),
                ctypes.byref(failed),
                handle,
            )
        )


def _check(result: int) -> None:
    if result:
        raise RuntimeError(f"the CUDA driver refused a copy from page-locked memory with error {result}")
