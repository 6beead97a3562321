"""Which kernels a batch meets on which GPU: PTX is written for NVIDIA's alone, and only where it can be read."""

from types import SimpleNamespace

import pytest
import torch
import triton

from pagedweight.kernels.decode import launches
from pagedweight.kernels.decode.launch import launch_decode_moe
from pagedweight.kernels.fused_moe import launch_fused_moe
from pagedweight.kernels.launch import shared_limit
from pagedweight.kernels.prefill.config import OLDEST_TRITON, can_prefill
from pagedweight.kernels.regimes import choose_regime

HAS_GLUON = tuple(map(int, triton.__version__.split(".")[:2])) >= OLDEST_TRITON


class Batch:
    """x as far as the choice looks at it."""

    is_cuda, device, dtype = True, torch.device("cuda", 0), torch.bfloat16

    def __init__(self, tokens: int) -> None:
        self.shape = tokens, 64

    def __len__(self) -> int:
        return self.shape[0]


@pytest.fixture
def gpu(monkeypatch):
    """Says what torch finds: a capability, and whether torch was built for ROCm."""

    def found(capability: tuple[int, int], hip: str | None = None) -> None:
        optin = {} if hip else {"shared_memory_per_block_optin": 101376}  # torch has it of NVIDIA's alone
        properties = SimpleNamespace(major=capability[0], **optin)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        monkeypatch.setattr(torch.version, "hip", hip)

    monkeypatch.setattr(launches, "_gate_up_kernel", object())  # as it is where kernels are not interpreted
    return found


def test_case_124_rocm_meets_no_kernel_that_writes_ptx(gpu):
    gpu((9, 4), hip="6.4")  # what ROCm calls a capability looks like Hopper's
    assert not launches.has_ptx(Batch(4))
    assert launches._hardware(Batch(4)) == (1 << 16, False, launches._INT8_IN_REGISTERS)
    assert shared_limit(Batch.device) == 1 << 16
    assert not can_prefill(Batch(200))
    assert choose_regime(Batch(4)) is choose_regime(Batch(200)) is launch_fused_moe


@pytest.mark.parametrize(
    ("capability", "ptx", "prefill"),
    [
        ((7, 5), False, False),
        ((8, 0), True, False),
        ((8, 9), True, False),
        ((9, 0), True, True),
        ((12, 0), True, False),
    ],
)
def test_case_123_an_nvidia_gpu_meets_what_its_generation_can_read(gpu, capability, ptx, prefill):
    gpu(capability)
    assert launches.has_ptx(Batch(4)) == ptx
    assert launches._hardware(Batch(4)) == (101376, capability[0] >= 9, launches._INT8_IN_REGISTERS)
    assert can_prefill(Batch(200)) == (prefill and HAS_GLUON)
    assert choose_regime(Batch(4)) is (launch_decode_moe if ptx else launch_fused_moe)
