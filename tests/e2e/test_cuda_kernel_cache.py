"""Kernels compiled for the first time by several processes at once, and with nowhere to put them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="needs the hf extra")

from tests.hf_models import quantized_folder

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys, torch, pagedweight
model = pagedweight.load(sys.argv[1], device_map="cuda")
ids = torch.arange(3, 12, device="cuda")[None]
with torch.no_grad():
    print(model(ids).logits.double().sum().item())
"""


def start(folder: Path, cache: Path) -> subprocess.Popen:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, "-c", SCRIPT, str(folder)]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_case_121_a_cold_cache_serves_four_processes_at_once_and_one_that_cannot_be_written_is_named(
    tmp_path: Path,
) -> None:
    folder = quantized_folder("M8")
    (tmp_path / "file").write_bytes(b"")
    refused = start(folder, tmp_path / "file" / "cache")
    running = [start(folder, tmp_path / "cache") for _ in range(4)]
    done = [(process.communicate(timeout=200), process.returncode) for process in running]
    assert [code for _, code in done] == [0] * 4, done
    assert len({out for (out, _), _ in done}) == 1
    assert list((tmp_path / "cache").iterdir())
    assert "set TRITON_CACHE_DIR to a folder that can" in refused.communicate(timeout=200)[1]
    assert refused.returncode == 1
