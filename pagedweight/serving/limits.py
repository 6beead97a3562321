"""What any request must keep to, before a handler sees it: size, number at once, time."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from pagedweight.serving.metrics import Requests

ENDPOINTS = ("/v1/completions", "/v1/chat/completions", "/v1/models")  # as labels; whatever else is "other"
LEFT, FAILED = 499, 500  # in the metrics: the client left before there was an answer; the application raised
BODY_SECONDS = 30.0  # at most, for a body to arrive: whoever sends slowly keeps no place
Scope, Message = dict[str, Any], dict[str, Any]
Receive, Send = Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]


class Limits(NamedTuple):
    """body_bytes: of one request. requests: answered or waiting at once. tokens: that a request may ask for.
    seconds: for one request, waiting included."""

    body_bytes: int = 2**20
    requests: int = 256
    tokens: int = 1024
    seconds: float = 600.0


class Guard:
    """ASGI middleware over /v1/: a request beyond a limit gets one JSON object, and the server goes on."""

    def __init__(self, app: Any, limits: Limits, requests: Requests) -> None:
        self._app = app
        self._limits = limits
        self._requests = requests
        self._running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith("/v1/"):
            await self._app(scope, receive, send)
            return
        answer, began, otherwise = Answer(send), time.monotonic(), FAILED
        try:
            await self._placed(scope, receive, answer)
            otherwise = LEFT
        finally:
            status = str(answer.status or otherwise)
            self._requests.answered.labels(scope["path"] if scope["path"] in ENDPOINTS else "other", status).inc()
            self._requests.seconds.observe(time.monotonic() - began)

    async def _placed(self, scope: Scope, receive: Receive, answer: Answer) -> None:
        if self._running >= self._limits.requests:
            await answer.refuse(429, f"{self._running} requests are running; try again", "rate_limit_exceeded")
            return
        self._running += 1
        self._requests.running.inc()
        try:
            await self._within_limits(scope, receive, answer)
        finally:
            self._running -= 1
            self._requests.running.dec()

    async def _within_limits(self, scope: Scope, receive: Receive, answer: Answer) -> None:
        try:
            async with asyncio.timeout(min(BODY_SECONDS, self._limits.seconds)):
                body = await read_body(receive, self._limits.body_bytes)
        except TimeoutError:
            await answer.refuse(408, "the body took too long to arrive; send it at once", "timeout")
            return
        if body is None:
            await answer.refuse(413, f"the body has more than {self._limits.body_bytes} bytes", "request_too_large")
            return
        replayed = Replayed(body)
        serving = asyncio.create_task(self._app(scope, replayed, answer.pass_on))
        watching = asyncio.create_task(replayed.watch(receive))
        try:
            async with asyncio.timeout(self._limits.seconds):
                await asyncio.wait((serving, watching), return_when=asyncio.FIRST_COMPLETED)
                if serving.done() or answer.ended:
                    await serving
        except TimeoutError:
            await stopped(serving)
            await answer.refuse(504, f"not done within {self._limits.seconds:g} s; ask for fewer tokens", "timeout")
        finally:
            await stopped(watching)
            await stopped(serving)


async def stopped(task: asyncio.Task) -> None:
    """Cancel a task that still runs, and wait until it has ended."""
    if not task.done():
        task.cancel()
        await asyncio.wait((task,))


async def read_body(receive: Receive, most_bytes: int) -> bytes | None:
    """A request's body, None when it is larger than allowed: the rest is then left unread."""
    parts, size, more = [], 0, True
    while more:
        message = await receive()
        if message["type"] != "http.request":  # the client is gone
            break
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > most_bytes:
            return None
        more = message.get("more_body", False)
    return b"".join(parts)


class Replayed:
    """receive() of a body that was read already, and then of the client's leaving, which watch() waits for."""

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body
        self._left = asyncio.Event()

    async def watch(self, receive: Receive) -> None:
        """Returns when the client has left, or its answer is complete."""
        while (await receive())["type"] != "http.disconnect":
            continue
        self._left.set()

    async def __call__(self) -> Message:
        if self._body is None:
            await self._left.wait()
            return {"type": "http.disconnect"}
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}


class Answer:
    """What is sent to one client. status: 0 before anything is."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status = 0
        self.ended = False

    async def pass_on(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        self.ended = message["type"] == "http.response.body" and not message.get("more_body", False)
        await self._send(message)

    async def refuse(self, status: int, message: str, code: str) -> None:
        """One JSON object; where an answer has begun, its end, with the sentence in a stream's form."""
        body = json.dumps(error(message, code)).encode()
        if self.status:
            await self.pass_on({"type": "http.response.body", "body": b"data: " + body + b"\n\n"})
            return
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        if status == 429:
            headers.append((b"retry-after", b"1"))
        await self.pass_on({"type": "http.response.start", "status": status, "headers": headers})
        await self.pass_on({"type": "http.response.body", "body": body})


def error(message: str, code: str) -> dict[str, Any]:
    """An error as OpenAI's clients read it."""
    return {"error": {"message": message, "type": code, "code": code, "param": None}}
