"""Benches are pytest functions named bench_*: `pytest bench` times them, `--benchmark-disable` runs each once."""

from __future__ import annotations

import pytest
import torch


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("python_files", "bench_*.py")
    config.addinivalue_line("python_functions", "bench_*")


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def _machine(benchmark: object) -> None:
    """Puts what the numbers depend on beside them."""
    benchmark.extra_info["torch"] = torch.__version__
    benchmark.extra_info["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
