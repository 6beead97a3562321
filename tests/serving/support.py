"""A server of the small model that ships, on a free port of this machine."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import uvicorn
from transformers import AutoTokenizer

import pagedweight
from pagedweight.serving.app import build_app
from pagedweight.serving.engine import Engine
from pagedweight.serving.limits import Limits

TINY = Path(pagedweight.__file__).parent / "assets/tiny-qwen2-moe"
ADMIN_TOKEN = "a-token-for-the-admin"
LIMITS = Limits(body_bytes=2**16, requests=80, tokens=24, seconds=120)


def engine(*, batched: bool, budget_bytes: int = 24 * 2**20) -> Engine:
    config = pagedweight.RuntimeConfig(budget_bytes=budget_bytes)
    model = pagedweight.load(TINY, config=config, dtype=torch.float32)
    return Engine(model.eval(), AutoTokenizer.from_pretrained(TINY), "tiny", batched=batched, batch_tokens=128)


@contextmanager
def served(running: Engine, limits: Limits = LIMITS, api_key: str | None = None) -> Iterator[str]:
    """The server's address while it runs in a thread beside."""
    app = build_app(running, limits, admin_token=ADMIN_TOKEN, api_key=api_key)
    listening = socket.create_server(("127.0.0.1", 0), backlog=256)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(timeout=20)
        assert not thread.is_alive()
        listening.close()
