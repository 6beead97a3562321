"""Connections of clients that send or read too slowly, or not at all, are closed: they keep no place from others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from uvicorn.protocols.http.auto import AutoHTTPProtocol

READ_BYTES = 2**14


class Deadline:
    """Calls a function once, unless it is cleared in time. May be started again."""

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float, late: Callable[[], None]) -> None:
        self._loop, self._seconds, self._late = loop, seconds, late
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Counts from the first start on."""
        if self._timer is None:
            self._timer = self._loop.call_later(self._seconds, self._late)

    def clear(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Timely(AutoHTTPProtocol):
    """uvicorn's connection, with two times that uvicorn leaves open.

    head_seconds: for a request's line and headers, from the opening of the connection or their first byte. A body's
    time is limits.BODY_SECONDS, that of a connection between two requests uvicorn's own.
    read_seconds: for a client to take at least READ_BYTES of what its connection has no more room for, again and again
    until there is room: who reads slowly gets all.
    """

    head_seconds = 20.0
    read_seconds = 60.0

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._head = Deadline(self.loop, self.head_seconds, transport.abort)
        self._read = Deadline(self.loop, self.read_seconds, self._look)
        self._head.start()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        answering = self.cycle is not None and not self.cycle.response_complete
        (self._head.clear if answering else self._head.start)()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread_bytes = self.transport.get_write_buffer_size()
        self._read.start()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._read.clear()

    def _look(self) -> None:
        """Another read_seconds for who has taken something in the last ones."""
        before, self._unread_bytes = self._unread_bytes, self.transport.get_write_buffer_size()
        if before - self._unread_bytes < READ_BYTES:
            self.transport.abort()
            return
        self._read.clear()
        self._read.start()

    def connection_lost(self, reason: Exception | None) -> None:
        super().connection_lost(reason)
        self._head.clear()
        self._read.clear()
