"""Clients that send their request slowly, or do not read their answer, against a server of a few lines."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="needs the serve extra")

import uvicorn

from pagedweight.serving.connections import Timely

SOON = 0.3
HEAD = b"GET / HTTP/1.1\r\nHost: here\r\n\r\n"
MUCH = b"x" * 2**20


class Hasty(Timely):
    head_seconds = SOON
    read_seconds = SOON


async def answering(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """64 MiB in pieces at /much and in one at /whole, a moment's work at /slow, else two letters."""
    if scope["path"] == "/slow":
        time.sleep(2 * SOON)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"transfer-encoding", b"chunked")]})
    for _ in range(64 if scope["path"] == "/much" else 0):
        await send({"type": "http.response.body", "body": MUCH, "more_body": True})
    await send({"type": "http.response.body", "body": 64 * MUCH if scope["path"] == "/whole" else b"ok"})


@pytest.fixture(scope="module")
def address() -> Iterator[tuple[str, int]]:
    listening = socket.create_server(("127.0.0.1", 0))
    settings = uvicorn.Config(answering, http=Hasty, ws="none", log_level="critical", lifespan="off")
    server = uvicorn.Server(settings)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    yield listening.getsockname()
    server.should_exit = True
    thread.join(timeout=20)
    assert not thread.is_alive()
    listening.close()


@pytest.fixture
def client(address: tuple[str, int]) -> Iterator[socket.socket]:
    with socket.create_connection(address, timeout=20) as made:
        yield made


def closed_within(client: socket.socket, seconds: float) -> bool:
    """Whether the server ends the connection in time, however much it says before."""
    client.settimeout(seconds)
    try:
        while client.recv(2**16):
            continue
    except TimeoutError:
        return False
    except ConnectionResetError:
        return True
    return True


def answered(client: socket.socket) -> bool:
    said = b""
    while b"ok\r\n0\r\n\r\n" not in said:
        said += client.recv(2**16)
    return said.startswith(b"HTTP/1.1 200")


def test_who_says_nothing_is_not_waited_for(client: socket.socket) -> None:
    assert closed_within(client, 30 * SOON)


def test_a_head_that_comes_in_drops_is_not_waited_for(client: socket.socket) -> None:
    """Each drop comes in time; all of them together do not."""
    try:
        for byte in HEAD:
            client.sendall(bytes([byte]))
            time.sleep(SOON / 4)
    except (ConnectionResetError, BrokenPipeError):
        return
    raise AssertionError("the whole head was taken")


def test_the_next_request_of_a_connection_has_its_own_time(client: socket.socket) -> None:
    for _ in range(3):
        client.sendall(HEAD)
        assert answered(client)
        time.sleep(2 * SOON)  # between two requests uvicorn's own time holds, which is longer
    client.sendall(HEAD[:5])
    assert closed_within(client, 30 * SOON)


def test_an_answer_that_takes_longer_is_waited_for(client: socket.socket) -> None:
    client.sendall(HEAD.replace(b"/ ", b"/slow "))
    assert answered(client)


def test_who_does_not_read_is_cut_off(client: socket.socket) -> None:
    client.sendall(HEAD.replace(b"/ ", b"/much "))
    time.sleep(6 * SOON)  # what the two ends' buffers take at first counts as read
    received = 0
    try:
        while part := client.recv(2**20):
            received += len(part)
    except ConnectionResetError:
        pass
    assert received < 64 * len(MUCH)


@pytest.mark.parametrize("path", [b"/much ", b"/whole "])
def test_who_reads_slowly_gets_all(client: socket.socket, path: bytes) -> None:
    """Also of one piece, which takes longer than the time for a client that takes nothing."""
    client.sendall(HEAD.replace(b"/ ", path))
    received, began = 0, time.monotonic()
    while received < 64 * len(MUCH):
        part = client.recv(2**20)
        assert part, f"cut off after {received} bytes"
        received += len(part)
        time.sleep(0.01)
    assert time.monotonic() - began > SOON
