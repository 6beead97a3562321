"""What vLLM loads in each of its processes (entry point vllm.general_plugins)."""

from __future__ import annotations

import vllm.version

from pagedweight.integrations.vllm.versions import check_version


def register() -> None:
    """Register the quantization method "pagedweight"; may be called any number of times.

    ImportError, before anything is registered, for a vLLM that is not served.
    """
    check_version(vllm.version.__version__)
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config

    from pagedweight.integrations.vllm import engine_hooks, worker_hooks
    from pagedweight.integrations.vllm.options import KEY
    from pagedweight.integrations.vllm.quant_config import PagedWeightConfig

    if KEY not in QUANTIZATION_METHODS:
        register_quantization_config(KEY)(PagedWeightConfig)
    worker_hooks.install()
    engine_hooks.install()
