"""The registered op pagedweight::fused_moe: Triton kernels on CUDA, the torch twin on the CPU.

The dispatcher chooses by device. Importing this module needs no Triton; launching on CUDA does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from pagedweight.kernels.call import Call, op_schema
from pagedweight.kernels.checks import check_arguments
from pagedweight.kernels.reference import fused_moe_reference

# torch.library.custom_op would go through Python twice more on the way, and look at all arguments for each of them:
# ten times the host's time of a call, of which a model without CUDA graphs has one a layer.
_LIBRARY = torch.library.Library("pagedweight", "FRAGMENT")
_LIBRARY.define("fused_moe" + op_schema(), tags=torch.Tag.pt2_compliant_tag)
_REFUSAL = "no_gradient(Tensor gradient, SymInt[] shape, ScalarType dtype) -> Tensor"
_LIBRARY.define(_REFUSAL, tags=torch.Tag.pt2_compliant_tag)
_NO_GRADIENT = "pagedweight::fused_moe has no gradient: planes are not trained; unpatch the model to train it"


def fused_moe(*arguments: Any, **named: Any) -> torch.Tensor:
    """One MoE layer's routed experts over paged planes; adds to the routing statistics. Takes the fields of a `Call`.

    out[t] = sum_a w[t, a] * (down_e combine(gate_up_e x[t] + b_e) + c_e) with e = expert_ids[t, a], summed in fp32;
    `reference.combine` says what an activation does to gate and up.

    Returns (T, H) in x.dtype. Raises ValueError when the arguments do not fit each other, RuntimeError in a backward
    pass.
    """
    call = Call(*arguments, **named)
    if _asks_for_gradients(call):
        return _WithoutGradient.apply(*call)
    return torch.ops.pagedweight.fused_moe.default(*call)


def _asks_for_gradients(call: Call) -> bool:
    if not torch.is_grad_enabled():
        return False
    inputs = (call.x, call.expert_weights, call.gate_up_bias, call.down_bias)
    return any(one is not None and one.requires_grad for one in inputs)


class _WithoutGradient(torch.autograd.Function):
    """Lets a forward pass through whose input asks for gradients."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> torch.Tensor:
        ctx.forms = [(one.shape, one.dtype) if isinstance(one, torch.Tensor) else None for one in arguments]
        return torch.ops.pagedweight.fused_moe.default(*arguments)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # Ops, so that a compiler can trace the pass which it will not run; one for each input that asks for a gradient,
        # for it leaves out what nobody asks for.
        refuse = torch.ops.pagedweight.no_gradient
        asked = zip(ctx.forms, ctx.needs_input_grad, strict=True)
        return tuple(refuse(*gradients, *form) if needed else None for form, needed in asked)


@torch.library.impl(_LIBRARY, "no_gradient", "CompositeExplicitAutograd")
def _no_gradient(gradient: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> NoReturn:
    raise RuntimeError(_NO_GRADIENT)


@torch.library.register_fake("pagedweight::no_gradient", lib=_LIBRARY)
def _no_gradient_fake(gradient: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return gradient.new_empty(shape, dtype=dtype)


@torch.library.impl(_LIBRARY, "fused_moe", "CPU")
def _fused_moe_cpu(*arguments: Any) -> torch.Tensor:
    return fused_moe_reference(_checked(arguments))


@torch.library.impl(_LIBRARY, "fused_moe", "CUDA")
def _fused_moe_cuda(*arguments: Any) -> torch.Tensor:
    return launch_on_cuda(_checked(arguments))


def _checked(arguments: tuple[Any, ...]) -> Call:
    call = Call(*arguments)
    check_arguments(call)
    if _asks_for_gradients(call):
        # `fused_moe` does not come here with such a call: whoever called the op itself would get a gradient of nothing.
        raise RuntimeError(f"{_NO_GRADIENT}, or call it under torch.no_grad()")
    return call


@torch.library.register_fake("pagedweight::fused_moe", lib=_LIBRARY)
def _fused_moe_fake(x: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def launch_on_cuda(call: Call) -> torch.Tensor:
    """The Triton kernels of the batch's regime. ImportError without Triton."""
    # Not at the top: where Triton has no wheel, everything but this launch must work.
    from pagedweight.kernels.regimes import choose_regime

    # Triton launches on the current device; make that the tensors' own.
    with torch.cuda.device(call.x.device):
        return choose_regime(call.x)(call)
