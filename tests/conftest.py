"""Runs Triton kernels through its interpreter where there is no CUDA device, and sets the hypothesis profiles."""

from __future__ import annotations

import os
import signal

import pytest
import torch

if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")):
    # Several workers that each take every core slow one another down.
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))

if not torch.cuda.is_available():
    # Before anything imports triton: the decorator decides at definition time.
    os.environ["TRITON_INTERPRET"] = "1"

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # As in a process that a shell started in the background: tests of Ctrl-C would meet none.
    signal.signal(signal.SIGINT, signal.default_int_handler)

from hypothesis import HealthCheck, settings

_SLOW_IS_FINE = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile(
    "cpu", max_examples=12, derandomize=True, deadline=None, database=None, suppress_health_check=_SLOW_IS_FINE
)
settings.register_profile("gpu", max_examples=50, deadline=None, suppress_health_check=_SLOW_IS_FINE)
settings.load_profile("gpu" if torch.cuda.is_available() else "cpu")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
