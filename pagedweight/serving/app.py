"""The server's routes: OpenAI's endpoints, /health, /metrics, and, with a token, a view of widths and plan."""

from __future__ import annotations

import json
import secrets
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import Depends, FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import ValidationError
from starlette.exceptions import HTTPException as RoutingError

from pagedweight.runtime.frames import OutOfFrames
from pagedweight.serving.engine import Answering, Engine
from pagedweight.serving.limits import Guard, Limits, error
from pagedweight.serving.metrics import Requests, registry_of
from pagedweight.serving.requests import ChatRequest, CompletionRequest, Generation, Refused, checked, handler_body


def build_app(engine: Engine, limits: Limits, *, admin_token: str, api_key: str | None = None) -> FastAPI:
    """The whole server as an ASGI application. api_key: what /v1/ asks for as a bearer token; None for nothing."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        engine.close()

    app = FastAPI(title="pagedweight", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    registry = registry_of(engine.paged)
    _answer_errors(app)
    _openai_routes(app, engine, limits, [] if api_key is None else [Depends(bearer(api_key))])
    _open_routes(app, engine, registry)
    _admin_routes(app, engine, bearer(admin_token))
    app.add_middleware(Guard, limits=limits, requests=Requests(registry))
    return app


def bearer(token: str) -> Callable[..., None]:
    """A dependency that lets through whoever sends the token."""
    scheme = HTTPBearer(auto_error=False)

    def check(given: HTTPAuthorizationCredentials | None = Depends(scheme)) -> None:  # noqa: B008 (FastAPI's way)
        if given is None or not secrets.compare_digest(given.credentials.encode(), token.encode()):
            raise HTTPException(401, "send the token as Authorization: Bearer ...", {"WWW-Authenticate": "Bearer"})

    return check


def _openai_routes(app: FastAPI, engine: Engine, limits: Limits, guards: list[Any]) -> None:
    @app.post("/v1/completions", dependencies=guards)
    async def completions(request: Request) -> Response:
        return await _generate(request, engine, limits, CompletionRequest, engine.completion)

    @app.post("/v1/chat/completions", dependencies=guards)
    async def chat(request: Request) -> Response:
        return await _generate(request, engine, limits, ChatRequest, engine.chat)

    @app.get("/v1/models", dependencies=guards)
    async def models() -> dict[str, Any]:
        served = {"id": engine.name, "object": "model", "created": 0, "owned_by": "pagedweight"}
        return {"object": "list", "data": [{**served, "max_model_len": engine.context_tokens}]}


async def _generate(
    request: Request, engine: Engine, limits: Limits, kind: type[Generation], handler: Answering
) -> Response:
    try:
        content = json.loads(await request.body())
    except (ValueError, RecursionError) as reason:
        raise Refused(f"the body is not JSON: {reason}") from reason
    body = handler_body(checked(content, kind), engine.name, limits.tokens, batched=engine.batched)
    try:
        prompt = await engine.tokenized(body)
    except ValueError as reason:
        raise Refused(str(reason)) from reason
    length = len(prompt["input_ids"])
    body["max_tokens"] = fitting(length, body.get("max_tokens"), limits.tokens, engine.context_tokens)
    return await handler.answer(body, prompt, str(uuid.uuid4()))


def fitting(prompt: int, wanted: int | None, most: int, context: int) -> int:
    """Tokens to generate after a prompt: as many as wanted, or where that is left open as many as may be and fit."""
    tokens = min(most, context - prompt) if wanted is None else wanted
    if prompt == 0 or tokens < 1 or prompt + tokens > context:
        asked = "" if wanted is None else f" and {wanted} are asked for"
        raise Refused(
            f"the prompt has {prompt} tokens{asked}; from 1 to {context} fit, with what is generated",
            code="context_length_exceeded",
        )
    return tokens


def _open_routes(app: FastAPI, engine: Engine, registry: Any) -> None:
    @app.get("/health")
    def health() -> JSONResponse:
        alive = engine.state.is_cb_alive()
        return JSONResponse({"status": "ok" if alive else "the batching worker has died"}, 200 if alive else 503)

    @app.get("/metrics")
    def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


def _admin_routes(app: FastAPI, engine: Engine, allowed: Callable[..., None]) -> None:
    guards = [Depends(allowed)]

    @app.get("/admin/widths", dependencies=guards)
    def widths() -> dict[str, Any]:
        seen, layout = engine.paged.glance(), engine.paged.layout
        layers = []
        for at, layer in enumerate(layout.moe_layers):
            first = layout.first_row(at)
            bits = seen.bits[first : first + 2 * layer.experts].reshape(layer.experts, 2)
            layers.append({"layer": layer.layer, "gate_up": bits[:, 0].tolist(), "down": bits[:, 1].tolist()})
        return {"step": seen.step, "mean_bits": seen.mean_bits, "widths": layout.widths, "layers": layers}

    @app.get("/admin/plan", dependencies=guards)
    def plan() -> dict[str, Any]:
        seen, config = engine.paged.glance(), engine.paged.config
        return {
            "explanation": engine.paged.explain(),
            "bytes_by_owner": seen.bytes_by_owner,
            "bytes_by_width": seen.bytes_by_width,
            "shortfall_bytes": seen.shortfall_bytes,
            "moves": seen.moves._asdict(),
            "thresholds": {
                "offload_free_blocks": config.offload_free_blocks,
                "reload_free_blocks": config.reload_free_blocks,
            },
        }

    @app.get("/admin/explain", dependencies=guards)
    def explain(layer: int, expert: int, projection: str) -> dict[str, str]:
        try:
            return {"explanation": engine.paged.explain(layer, expert, projection)}
        except KeyError as reason:
            raise Refused(str(reason.args[0]), 404, "not_found") from reason


def _answer_errors(app: FastAPI) -> None:
    """Every error as one JSON object in OpenAI's form."""

    @app.exception_handler(Refused)
    async def refused(request: Request, reason: Refused) -> JSONResponse:
        return JSONResponse(error(str(reason), reason.code), reason.status)

    @app.exception_handler(ValidationError)
    async def invalid(request: Request, reason: ValidationError) -> JSONResponse:
        first = [f"{'.'.join(map(str, e['loc'])) or 'body'}: {e['msg']}" for e in reason.errors()[:3]]
        return JSONResponse(error("; ".join(first), "invalid_request_error"), 400)

    @app.exception_handler(RoutingError)
    async def known(request: Request, reason: RoutingError) -> JSONResponse:
        return JSONResponse(error(str(reason.detail), "invalid_request_error"), reason.status_code, reason.headers)

    @app.exception_handler(OutOfFrames)
    async def full(request: Request, reason: OutOfFrames) -> JSONResponse:
        return JSONResponse(error(str(reason), "out_of_memory"), 503, {"Retry-After": "1"})

    @app.exception_handler(500)
    async def failed(request: Request, reason: Exception) -> JSONResponse:
        """Whatever else: the reason goes to the log, not to the client."""
        return JSONResponse(error("the server failed; its log says why", "server_error"), 500)
