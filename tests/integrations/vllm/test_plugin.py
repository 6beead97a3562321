"""Registering with vLLM: as often as it likes, and not at all where the version is not served."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import fields
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("vllm", reason="needs vLLM: see docs/vllm.md")

import vllm.plugins
import vllm.version
from vllm.config import ParallelConfig
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, get_quantization_config
from vllm.v1.engine.core import EngineCore
from vllm.v1.worker.worker_base import WorkerWrapperBase

from pagedweight.integrations.vllm.plugin import register
from pagedweight.integrations.vllm.quant_config import PagedWeightConfig, check_served
from pagedweight.integrations.vllm.versions import watch_batches

pytestmark = pytest.mark.vllm


def test_case_96_nothing_is_registered_with_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    before = list(QUANTIZATION_METHODS), WorkerWrapperBase.execute_model, EngineCore._initialize_kv_caches
    monkeypatch.setattr(vllm.version, "__version__", "0.19.0")
    with pytest.raises(ImportError, match=r"0\.19\.0"):
        register()
    assert before == (list(QUANTIZATION_METHODS), WorkerWrapperBase.execute_model, EngineCore._initialize_kv_caches)


def test_case_96_vllm_itself_ends_with_the_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """As each of its processes loads plugins, by the installed entry point; with VLLM_PLUGINS it goes on without us."""
    monkeypatch.setattr(vllm.version, "__version__", "0.19.0")
    for allowed, ends in ("pagedweight", True), ("another", False):
        monkeypatch.setenv("VLLM_PLUGINS", allowed)
        monkeypatch.setattr(vllm.plugins, "plugins_loaded", False)
        with pytest.raises(ImportError, match=r"^vLLM is 0\.19\.0; .*VLLM_PLUGINS.*$") if ends else nullcontext():
            vllm.plugins.load_general_plugins()


def test_case_95_registering_twice_is_registering_once() -> None:
    register()
    once = list(QUANTIZATION_METHODS), WorkerWrapperBase.execute_model, EngineCore._initialize_kv_caches
    register()
    assert once == (list(QUANTIZATION_METHODS), WorkerWrapperBase.execute_model, EngineCore._initialize_kv_caches)
    assert get_quantization_config("pagedweight") is PagedWeightConfig


def test_batches_of_the_second_model_runner_are_told_before_their_forward() -> None:
    """As later versions have it: its own batch type, and a stand-in for the runner, which needs a GPU."""
    batches = pytest.importorskip("vllm.v1.worker.gpu.input_batch", reason="this vLLM has one model runner")
    assert {"req_ids", "num_scheduled_tokens"} <= {field.name for field in fields(batches.InputBatch)}
    given = SimpleNamespace(req_ids=["a", "b"], num_scheduled_tokens=np.array([1, 7]))
    runner, told = SimpleNamespace(prepare_inputs=lambda scheduler_output: given), []
    assert watch_batches(runner, lambda requests, tokens: told.append((requests, tokens.tolist())))
    assert runner.prepare_inputs("a step") is given
    assert told == [(["a", "b"], [1, 7])]
    assert not watch_batches(SimpleNamespace(), told.append)


def config(modules: list[str] | None = None, *, adapters: bool = False) -> SimpleNamespace:
    """What of vLLM's configuration is looked at."""
    return SimpleNamespace(
        parallel_config=ParallelConfig(distributed_executor_backend="mp"),
        model_config=SimpleNamespace(enable_sleep_mode=False),
        lora_config=SimpleNamespace(target_modules=modules) if adapters else None,
    )


def test_an_executor_whose_workers_pass_by_the_boundary_is_refused() -> None:
    given = config()
    check_served(given)
    given.parallel_config.distributed_executor_backend = "ray"  # set afterwards: Ray itself is not needed here
    with pytest.raises(ValueError, match="does not serve with distributed_executor_backend=ray yet"):
        check_served(given)


@pytest.mark.parametrize("modules", [None, ["qkv_proj", "experts"]])
def test_adapters_that_could_change_experts_are_refused(modules: list[str] | None) -> None:
    check_served(config(["qkv_proj", "o_proj"], adapters=True))
    with pytest.raises(ValueError, match="name those, such as qkv_proj"):
        check_served(config(modules, adapters=True))
