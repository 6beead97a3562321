"""What a client may send, checked before anything runs; and the form in which transformers' handlers take it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

LONGEST_ID = 256
Stop = Annotated[str, StringConstraints(min_length=1, max_length=64)]
# OpenAI's fields that mean nothing here unless they ask for something: refused only then.
NEUTRAL = {
    "n": (None, 1),
    "best_of": (None, 1),
    "echo": (None, False),
    "logprobs": (None, False, 0),
    "top_logprobs": (None, 0),
    "presence_penalty": (None, 0),
    "logit_bias": (None, {}),
    "response_format": (None, {"type": "text"}),
    "suffix": (None,),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "stream_options": (None, {}, {"include_usage": True}, {"include_usage": False}),
}
UNREAD = ("user", "metadata", "store", "service_tier", "parallel_tool_calls")
# What transformers' continuous batching cannot do for one request apart from the others.
ALONE_ONLY = ("stop", "seed", "frequency_penalty")


class Generation(BaseModel):
    """Fields of both endpoints."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = Field(None, max_length=LONGEST_ID)
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    frequency_penalty: float | None = Field(None, gt=-1, le=2)
    seed: int | None = Field(None, ge=0, lt=2**63)
    stop: Stop | list[Stop] | None = None
    stream: bool | None = None


class CompletionRequest(Generation):
    """POST /v1/completions."""

    prompt: str = Field(min_length=1)


class TextPart(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text"]
    text: str


class Message(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = Field(None, max_length=LONGEST_ID)


class ChatRequest(Generation):
    """POST /v1/chat/completions."""

    max_completion_tokens: int | None = Field(None, ge=1)
    messages: list[Message] = Field(min_length=1)


class Refused(ValueError):
    """A request that is not served. status: of HTTP. code: as OpenAI's clients know it."""

    def __init__(self, message: str, status: int = 400, code: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.status = status
        self.code = code


def checked(body: object, kind: type[Generation]) -> Generation:
    """The request in a body of JSON; Refused with every field that is wrong, pydantic's ValidationError among them."""
    if not isinstance(body, dict):
        raise Refused(f"the body holds a {type(body).__name__}; send one JSON object")
    for name, neutral in NEUTRAL.items():
        if name in body and body[name] not in neutral:
            raise Refused(f"{name} is not served here; leave it out")
    dropped = (*NEUTRAL, *UNREAD)
    return kind.model_validate({name: value for name, value in body.items() if name not in dropped})


def handler_body(request: Generation, name: str, most_tokens: int, *, batched: bool) -> dict[str, Any]:
    """What transformers' handler takes. Refused for another model, too many tokens, or what batching cannot do.

    name: the served model's. most_tokens: that a request may ask for.
    """
    if request.model not in (None, name):
        raise Refused(f"the model {request.model!r} is not served; this server has {name!r}", 404, "model_not_found")
    body = request.model_dump(exclude_none=True)
    wanted = body.pop("max_completion_tokens", None) or body.get("max_tokens")
    if wanted is not None and wanted > most_tokens:
        raise Refused(f"max_tokens is {wanted}; this server gives at most {most_tokens}")
    asked = [field for field in ALONE_ONLY if body.get(field)]
    if batched and asked:
        raise Refused(f"{', '.join(asked)}: not with continuous batching; start the server with --batching off")
    return {**body, "model": name, **({} if wanted is None else {"max_tokens": wanted})}
