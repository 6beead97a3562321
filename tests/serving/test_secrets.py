"""Keys and tokens stay out of logs, whatever is logged, and the server answers only at the address it is bound to."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator

import pytest

pytest.importorskip("fastapi", reason="needs the serve extra")
pytest.importorskip("prometheus_client", reason="needs the serve extra")
pytest.importorskip("psutil", reason="continuous batching needs psutil")

import httpx
from typer.testing import CliRunner

from pagedweight.cli import serve as cli_serve
from pagedweight.cli.main import app
from tests.serving.support import ADMIN_TOKEN, TINY, engine, served

KEY = "the-key-of-a-user-0123456789"
WRONG = "a-wrong-key-that-is-somebodys-0123"
BODY = {"prompt": "The old harbour", "max_tokens": 2}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with served(engine(batched=False), api_key=KEY) as at:
        yield at


def test_no_log_of_any_level_holds_a_key_or_a_token(
    address: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture
) -> None:
    for name in ("", "uvicorn", "uvicorn.error", "uvicorn.access", "transformers", "httpx", "httpcore", "asyncio"):
        caplog.set_level(logging.DEBUG, logger=name)
    logging.getLogger("uvicorn.access").propagate = True
    for token in (KEY, WRONG, ADMIN_TOKEN):
        headers = {"Authorization": f"Bearer {token}"}
        for path in ("/v1/completions", "/v1/chat/completions"):
            httpx.post(address + path, headers=headers, json=BODY, timeout=60)
            httpx.post(address + path, headers=headers, content=b"{", timeout=60)
        for path in ("/admin/plan", "/admin/explain?layer=x", "/metrics", "/health", "/nowhere"):
            httpx.get(address + path, headers=headers, timeout=60)
    shown = "".join(capfd.readouterr())
    # What the client of this test logs of its own headers is not the server's doing.
    logged = [record.getMessage() for record in caplog.records if not record.name.startswith(("httpx", "httpcore"))]
    for secret in (KEY, WRONG, ADMIN_TOKEN):
        assert secret not in shown
        assert not [line for line in logged if secret in line]


def test_answers_do_not_hold_them_either(address: str) -> None:
    for token in (KEY, WRONG, ADMIN_TOKEN):
        headers = {"Authorization": f"Bearer {token}"}
        answers = [
            httpx.post(f"{address}/v1/completions", headers=headers, json={**BODY, "max_tokens": -1}),
            httpx.get(f"{address}/admin/plan", headers=headers),
            httpx.get(f"{address}/metrics", headers=headers),
        ]
        assert not any(secret in answer.text for answer in answers for secret in (KEY, WRONG, ADMIN_TOKEN))


def test_the_line_that_says_what_is_started_leaves_secrets_out(vllm_started: list[list[str]]) -> None:
    options = ["--api-key", "first-secret", "second-secret", "--seed", "1", "--hf-token=third-secret"]
    done = CliRunner().invoke(app, ["serve", str(TINY), "--", *options])
    assert vllm_started[0][-len(options) :] == options
    assert "--api-key ... ... --seed 1 --hf-token=..." in done.stderr
    assert "secret" not in done.output
    refused = CliRunner().invoke(app, ["serve", str(TINY), "--engine", "transformers", "--", *options])
    assert "add --engine vllm" in refused.stderr
    assert "secret" not in refused.output


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2"])
def test_only_the_bound_address_answers(host: str) -> None:
    others = {"127.0.0.1", "127.0.0.2", "127.0.0.3", *_own_addresses()} - {host}
    with cli_serve._bound(host, 0) as bound:
        bound.listen()
        port = bound.getsockname()[1]
        with socket.create_connection((host, port), timeout=5):
            pass
        for other in others:
            with pytest.raises(OSError, match=r"refused|unreachable|timed out"):
                socket.create_connection((other, port), timeout=5)


def _own_addresses() -> set[str]:
    try:
        return {entry[4][0] for entry in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)}
    except OSError:  # a machine without a name
        return set()


def test_the_server_is_bound_to_this_machine_alone_unless_told_otherwise() -> None:
    options = {parameter.name: parameter.default for parameter in _serve_options()}
    assert options["host"] == "127.0.0.1"


def _serve_options() -> list:
    import typer

    return typer.main.get_command(app).commands["serve"].params
