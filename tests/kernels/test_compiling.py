import pytest
import torch

from pagedweight.layout import MoeLayer, RoutingStats
from tests.kernels.decode.support import DEVICE, random_batch, random_layer

pytestmark = pytest.mark.gpu  # the interpreter compiles nothing


@pytest.mark.parametrize("id_type", [torch.int64, torch.int32], ids=str)
def test_calls_after_compiling_ahead_compile_no_product(monkeypatch, id_type):
    import triton

    from pagedweight.kernels.call import Call
    from pagedweight.kernels.compiling import compile_kernels
    from pagedweight.kernels.ops import fused_moe

    layer = random_layer(MoeLayer(0, 6, 320, 192, "silu"), (3, 5), seed=1)
    stats = RoutingStats.zeros(1, 1, 6, device=DEVICE)
    batch = random_batch(layer, 1, 2, dtype=torch.bfloat16)
    call = Call(*batch._replace(ids=batch.ids.to(id_type)), **layer.layer.arguments(layer.tables, stats))
    counted = []
    assert compile_kernels(call, (1, 5, 100), lambda *seen: counted.append(seen)) > 4
    kernels = counted[0][1]
    assert counted == [(done, kernels) for done in range(kernels + 1)]
    compiled = []
    monkeypatch.setattr(
        triton.knobs.runtime, "jit_post_compile_hook", lambda *, fn, **_: compiled.append(fn.jit_function.__name__)
    )
    for tokens in (1, 5, 100):
        batch = random_batch(layer, tokens, 2, seed=tokens, dtype=torch.bfloat16)
        assert torch.isfinite(fused_moe(*call.with_batch(*batch._replace(ids=batch.ids.to(id_type))))).all()
    assert not {"_gate_up_kernel", "_down_kernel"} & set(compiled)
