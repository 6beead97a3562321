"""transformers' own server parts around one paged model: its handlers, its continuous batching, our arena's caches."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from fastapi import Response
from jinja2 import TemplateError
from transformers import (
    BatchEncoding,
    ContinuousBatchingConfig,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.utils import BaseGenerateManager, CBGenerateManager, GenerateManager, GenerationState

from pagedweight.demo.evaluation import cache_argument

PAGE_TOKENS = 32  # of the KV cache of continuous batching
NO_BUDGET_TOKENS = 2**16  # that it holds where the KV cache has memory of its own
GREEDY_TOP_P = 1e-6  # only the likeliest token is left
LEAST_TEMPERATURE = 0.01  # greedy below: logits over less overflow fp16, and one such row ends the whole batch's worker
# Other than OpenAI's defaults, without which transformers makes no place for a request's own.
BASE_TEMPERATURE, BASE_TOP_P = 0.7, 0.9


class OneModel(ModelManager):
    """The one model that is served, under one name; nothing else is ever loaded, and it is never unloaded."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
        super().__init__()
        self.force_model = name
        self._model = model
        self._tokenizer = tokenizer

    def process_model_name(self, model_id: str) -> str:
        return model_id

    def load_model_and_processor(self, *args: Any, **kwargs: Any) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        return self._model, self._tokenizer


class Answering:
    """Of a handler: it takes a prompt's tokens, and requests are sampled as OpenAI's are, at temperature 1 and of all
    tokens unless they say otherwise.

    transformers would tokenize the prompt on the event loop, where every other client waits for it, and leave it to
    the model's own generation config whether a request is sampled at all.
    """

    async def answer(self, body: dict[str, Any], prompt: BatchEncoding, request_id: str) -> Response:
        """A request's whole answer, or its stream. prompt: as Engine.tokenized gives it."""
        name, model, tokenizer = self._resolve_model(body)
        modality = self.model_manager.get_model_modality(model, processor=tokenizer)
        batched = self.generation_state.use_continuous_batching(model, modality)
        manager = self.generation_state.get_manager(name, use_cb=batched)
        config = self._build_generation_config(body, model.generation_config, use_cb=batched)
        if batched:
            manager.init_cb(model, config)
        else:
            one = {field: [values] for field, values in prompt.items()}
            prompt = BatchEncoding(one, tensor_type="pt").to(model.device)
        parts = (request_id, model, tokenizer, name, prompt, config)
        if body.get("stream"):
            return self._streaming(*parts, gen_manager=manager)
        return await self._non_streaming(*parts, gen_manager=manager)

    def _build_generation_config(self, body: dict[str, Any], *args: Any, **kwargs: Any) -> GenerationConfig:
        config = super()._build_generation_config(body, *args, **kwargs)
        temperature = body.get("temperature", 1.0)
        config.do_sample = temperature >= LEAST_TEMPERATURE
        config.temperature, config.top_p = temperature if config.do_sample else 1.0, body.get("top_p", 1.0)
        config.top_k = 0 if config.do_sample else None
        return config


class Chat(Answering, ChatCompletionHandler):
    """POST /v1/chat/completions."""


class Completion(Answering, CompletionHandler):
    """POST /v1/completions."""


class InArena:
    """A model whose generate() takes its KV cache from the arena and gives it back when it is done."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def generate(self, **inputs: Any) -> torch.Tensor:
        if self._model.pagedweight.kv is None:
            return self._model.generate(**inputs)
        cache = self._model.pagedweight.new_cache()
        try:
            return self._model.generate(**inputs, **{cache_argument(self._model): cache})
        finally:
            cache.release()


class OneByOne(GenerateManager):
    """Requests one after the other, in the order in which they came, each with a cache in the arena."""

    def generate_streaming(self, model: PreTrainedModel, *args: Any, **kwargs: Any) -> tuple:
        return super().generate_streaming(InArena(model), *args, **kwargs)

    async def generate_non_streaming(self, model: PreTrainedModel, *args: Any, **kwargs: Any) -> tuple:
        return await super().generate_non_streaming(InArena(model), *args, **kwargs)


class Sampling:
    """A continuous batching manager that gives every request its own temperature and top_p."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._chosen: dict[str, dict[str, float]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    def choose(self, request_id: str, config: GenerationConfig) -> None:
        """For the coming add_request with this id."""
        top_p = float(config.top_p) if config.do_sample else GREEDY_TOP_P
        self._chosen[request_id] = {"temperature": float(config.temperature), "top_p": top_p}

    def add_request(self, input_ids: list[int], request_id: str, **kwargs: Any) -> str:
        return self._manager.add_request(input_ids, request_id=request_id, **kwargs, **self._chosen.pop(request_id, {}))


class Together(CBGenerateManager):
    """Requests in one batch that is put together anew before every forward."""

    def init_cb(self, model: PreTrainedModel, gen_config: Any) -> None:
        if self._cb is None:
            base = GenerationConfig.from_dict(gen_config.to_dict())
            base.update(do_sample=True, temperature=BASE_TEMPERATURE, top_p=BASE_TOP_P, top_k=None)
            super().init_cb(model, base)
            self._cb = Sampling(self._cb)

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str, **kwargs: Any
    ) -> tuple:
        self._cb.choose(request_id, gen_config)
        return super().generate_streaming(model, processor, inputs, gen_config, request_id, **kwargs)

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str, **kwargs: Any
    ) -> tuple:
        self._cb.choose(request_id, gen_config)
        done = False
        try:
            answer = await super().generate_non_streaming(model, processor, inputs, gen_config, request_id, **kwargs)
            done = True
        finally:
            if not done:  # the client's time is up: nobody waits for the rest
                self._cb.cancel_request(request_id)
        return answer


class OwnState(GenerationState):
    """transformers' state with managers of ours; one whose worker has died is replaced for the next request."""

    def get_manager(self, model_id: str, use_cb: bool = False) -> BaseGenerateManager:
        if use_cb:
            if self._cb_manager is not None and not self._cb_manager.is_alive():
                self._cb_manager.stop()
                self._cb_manager = None
            if self._cb_manager is None:
                self._cb_manager, self._cb_model_id = Together(cb_config=self._cb_config), model_id
            return self._cb_manager
        return self._generate_managers.setdefault(model_id, OneByOne())


class Engine:
    """One model and what answers requests with it. batched: continuous batching, or one request after the other."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str, *, batched: bool, batch_tokens: int
    ) -> None:
        self.name, self.batched = name, batched
        self.model, self.tokenizer = model, tokenizer
        # One thread: a tokenizer's own settings are not to be changed by two calls at once.
        self._tokenizing = ThreadPoolExecutor(1, thread_name_prefix="tokenizing")
        self.state = OwnState(continuous_batching=batched, cb_config=batching_config(model, batch_tokens))
        manager = OneModel(model, tokenizer, name)
        self.chat = Chat(manager, self.state)
        self.completion = Completion(manager, self.state)

    @property
    def paged(self) -> Any:
        return self.model.pagedweight

    @property
    def context_tokens(self) -> int:
        """Tokens that the model was made for, or fewer where the budget holds no more of one request's."""
        known = getattr(self.model.config.get_text_config(), "max_position_embeddings", None) or 2**31
        return min(known, budget_tokens(self.model))

    async def tokenized(self, body: dict[str, Any]) -> BatchEncoding:
        """A request's prompt, on a thread of its own: a long one keeps no other client waiting. ValueError as below."""
        return await asyncio.get_running_loop().run_in_executor(self._tokenizing, self._tokenize, body)

    def _tokenize(self, body: dict[str, Any]) -> BatchEncoding:
        """Tokens of the prompt, its chat template filled in. ValueError without a template that takes it."""
        if "prompt" in body:
            return self.tokenizer(body["prompt"])
        messages = [{"role": said["role"], "content": _text(said["content"])} for said in body["messages"]]
        try:
            return self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        except TemplateError as reason:
            raise ValueError(f"the model's chat template does not take these messages: {reason}") from reason

    def close(self) -> None:
        """Stop what generates."""
        self.state.shutdown()
        self._tokenizing.shutdown(wait=False, cancel_futures=True)


def batching_config(model: PreTrainedModel, batch_tokens: int) -> ContinuousBatchingConfig:
    """batch_tokens: of one forward. Pages of PAGE_TOKENS tokens, and as many blocks as the budget can hold."""
    fields = ContinuousBatchingConfig.__dataclass_fields__
    page = "page_size" if "page_size" in fields else "block_size"  # the name changed in transformers 5.17
    return ContinuousBatchingConfig(
        num_blocks=max(1, min(budget_tokens(model), NO_BUDGET_TOKENS) // PAGE_TOKENS),
        max_batch_tokens=batch_tokens,
        per_request_processors=True,
        **{page: PAGE_TOKENS},
    )


def budget_tokens(model: PreTrainedModel) -> int:
    """Tokens of KV cache that fit when every weight is at the floor; beyond counting without a budget."""
    paged = model.pagedweight
    seen = paged.glance()
    if paged.kv is None or seen.kv is None:
        return 2**31
    held = sum(seen.bytes_by_owner.values()) - int(paged.store.host.sizes.resident_bytes()[:, 0].sum())
    return max(1, held // seen.kv.block_bytes * paged.config.block_tokens)


def _text(content: str | list[dict[str, str]]) -> str:
    return content if isinstance(content, str) else " ".join(part["text"] for part in content)
