"""The guard before every request: size, number at once and time, with applications of a few lines behind it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

pytest.importorskip("prometheus_client", reason="needs the serve extra")

from prometheus_client import CollectorRegistry, generate_latest

from pagedweight.serving.limits import Guard, Limits
from pagedweight.serving.metrics import Requests


def guarded(app: Any, **limits: Any) -> Guard:
    return Guard(app, Limits()._replace(**limits), Requests(CollectorRegistry()))


async def ask(
    guard: Guard, *parts: bytes, path: str = "/v1/completions", leaves_after: float = 3600.0
) -> tuple[int, bytes]:
    """Status and body of one request whose body comes in parts, and whose client leaves at some time."""
    sent: list[dict[str, Any]] = []
    coming = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    coming.append({"type": "http.request", "body": b"", "more_body": False})

    async def receive() -> dict[str, Any]:
        if coming:
            return coming.pop(0)
        await asyncio.sleep(leaves_after)
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await guard({"type": "http", "path": path}, receive, send)
    return sent[0]["status"] if sent else 0, b"".join(message.get("body", b"") for message in sent)


async def answering(scope: Any, receive: Any, send: Any) -> None:
    """Sends the body back."""
    body = (await receive())["body"]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body})


async def sleeping(scope: Any, receive: Any, send: Any) -> None:
    await asyncio.sleep(60)


async def stuck_stream(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"data: first\n\n", "more_body": True})
    await asyncio.sleep(60)


def test_a_body_arrives_whole_and_one_byte_too_many_does_not() -> None:
    guard = guarded(answering, body_bytes=10)
    assert asyncio.run(ask(guard, b"12345", b"67890")) == (200, b"1234567890")
    status, body = asyncio.run(ask(guard, b"12345", b"67890", b"1"))
    assert status == 413
    assert "10 bytes" in json.loads(body)["error"]["message"]


def test_a_request_too_many_is_told_to_come_again() -> None:
    async def three() -> list[int]:
        guard = guarded(sleeping, requests=2, seconds=0.2)
        first = [asyncio.create_task(ask(guard)) for _ in range(2)]
        await asyncio.sleep(0.05)
        refused, _ = await ask(guard)
        waited = [(await task)[0] for task in first]
        return [refused, *waited, (await ask(guard))[0]]

    assert asyncio.run(three()) == [429, 504, 504, 504]


def test_time_ends_a_stream_too_in_the_streams_own_form() -> None:
    status, body = asyncio.run(ask(guarded(stuck_stream, seconds=0.1)))
    assert status == 200
    first, last = body.decode().strip().split("\n\n")
    assert first == "data: first"
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "timeout"


def test_other_paths_pass_by() -> None:
    assert asyncio.run(ask(guarded(answering, body_bytes=1), b"12345", path="/metrics"))[0] == 200


def test_a_failing_application_gives_its_place_back() -> None:
    async def failing(scope: Any, receive: Any, send: Any) -> None:
        raise RuntimeError("down")

    guard = guarded(failing, requests=1)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="down"):
            asyncio.run(ask(guard))


def test_a_client_that_leaves_is_not_worked_for() -> None:
    ended: list[str] = []

    async def working(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    guard = guarded(working, requests=1)
    for _ in range(2):
        assert asyncio.run(ask(guard, leaves_after=0.05)) == (0, b"")
    assert ended == ["cancelled"] * 2


def test_whoever_waits_for_the_client_to_leave_is_told() -> None:
    async def streaming(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        left = await receive()
        await send({"type": "http.response.body", "body": left["type"].encode()})

    assert asyncio.run(ask(guarded(streaming), leaves_after=0.05)) == (200, b"http.disconnect")


def test_a_body_that_never_arrives_gives_its_place_back() -> None:
    async def asked_twice() -> list[int]:
        guard, sent = guarded(answering, requests=1, seconds=0.05), []

        async def silent() -> dict[str, Any]:
            await asyncio.sleep(60)
            raise AssertionError("waited to the end")

        async def send(message: dict[str, Any]) -> None:
            sent.append(message.get("status", 0))

        await asyncio.wait_for(guard({"type": "http", "path": "/v1/completions"}, silent, send), timeout=20)
        return [sent[0], (await ask(guard))[0]]

    assert asyncio.run(asked_twice()) == [408, 200]


def test_a_failing_application_is_in_the_metrics() -> None:
    async def failing(scope: Any, receive: Any, send: Any) -> None:
        raise KeyError("down")

    registry = CollectorRegistry()
    with pytest.raises(KeyError):
        asyncio.run(ask(Guard(failing, Limits(), Requests(registry))))
    labels = {"endpoint": "/v1/completions", "status": "500"}
    assert registry.get_sample_value("pagedweight_requests_total", labels) == 1


def test_paths_of_a_clients_own_are_no_labels() -> None:
    registry = CollectorRegistry()
    guard = Guard(answering, Limits(body_bytes=1), Requests(registry))
    assert asyncio.run(ask(guard, b"123", path="/v1/of my own"))[0] == 413
    assert registry.get_sample_value("pagedweight_requests_total", {"endpoint": "other", "status": "413"}) == 1
    assert "of my own" not in generate_latest(registry).decode()
