"""`pagedweight serve` as a command: what it refuses before a model loads, and vLLM's server in its place."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client", reason="needs the serve extra")

import typer
from typer.testing import CliRunner

import pagedweight
from pagedweight.cli import serve as cli_serve
from pagedweight.cli.main import app
from pagedweight.cli.serve import _loopback
from pagedweight.cli.top import read
from pagedweight.cli.top_reading import Reading

TINY = Path(pagedweight.__file__).parent / "assets/tiny-qwen2-moe"
RUNNER = CliRunner()


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["none"], "quantize the model"),
        ([str(TINY), "--budget", "lots"], "lots"),
        ([str(TINY), "--budget", "1MiB"], "give at least"),
        ([str(TINY), "--dtype", "int3"], "int3"),
        ([str(TINY), "--max-body", "x"], "--max-body"),
        ([str(TINY), "--", "--max-model-len", "9"], "--engine vllm"),
    ],
)
def test_what_cannot_be_served_is_refused_in_one_sentence(arguments: list[str], word: str) -> None:
    pytest.importorskip("fastapi", reason="needs the serve extra")
    done = RUNNER.invoke(app, ["serve", "--engine", "transformers", "--device", "cpu", *arguments])
    assert done.exit_code == 2, done.output
    assert word in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.output


def test_of_two_servers_that_load_for_one_port_the_later_is_told(capsys: pytest.CaptureFixture) -> None:
    pytest.importorskip("fastapi", reason="needs the serve extra")
    with cli_serve._bound("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with cli_serve._bound("127.0.0.1", port) as second:
            first.listen()
            with pytest.raises(typer.Exit):
                cli_serve._listen(None, "small", second, 4)
    said = capsys.readouterr().err
    assert f"127.0.0.1 port {port}: Address already in use; give another" in said
    assert "serving" not in said


def test_what_is_no_token_is_refused(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("short\n")
    (tmp_path / "binary").write_bytes(b"\xff" * 20)
    (tmp_path / "spaced").write_text("sixteen and more characters")
    for option in ("--api-key-file", "--admin-token-file"):
        for name in ("token", "binary", "spaced"):
            done = RUNNER.invoke(app, ["serve", str(TINY), option, str(tmp_path / name), "--engine", "transformers"])
            assert done.exit_code == 2
            assert "at least 16" in done.stderr


def test_vllms_server_is_given_address_and_name(vllm_started: list[list[str]]) -> None:
    RUNNER.invoke(app, ["serve", str(TINY), "--host", "::1", "--port", "9", "--name", "small", "--", "--seed", "1"])
    assert vllm_started[0][-8:] == ["--host", "::1", "--port", "9", "--served-model-name", "small", "--seed", "1"]


def test_what_vllms_server_would_not_hear_of_is_refused(tmp_path: Path, vllm_started: list[list[str]]) -> None:
    """A key, above all: without it that server would answer whoever comes."""
    (tmp_path / "key").write_text("the-key-of-all-users")
    given = ["--budget", "1GiB", "--api-key-file", str(tmp_path / "key")]
    done = RUNNER.invoke(app, ["serve", str(TINY), "--engine", "vllm", *given])
    assert done.exit_code == 2
    assert "--budget, --api-key-file: not with --engine vllm" in done.stderr
    assert vllm_started == []


def test_options_of_our_server_choose_it(vllm_started: list[list[str]]) -> None:
    done = RUNNER.invoke(app, ["serve", str(TINY), "--dtype", "int3"])
    assert "int3" in done.stderr  # its own refusal
    assert vllm_started == []


def test_a_free_port_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    uvicorn = pytest.importorskip("uvicorn", reason="needs the serve extra")
    bound: list[int] = []
    monkeypatch.setattr(
        uvicorn.Server, "run", lambda server, sockets: bound.extend(one.getsockname()[1] for one in sockets)
    )
    done = RUNNER.invoke(app, ["serve", str(TINY), "--port", "0", "--engine", "transformers", "--device", "cpu"])
    assert done.exit_code == 0, done.output
    assert bound[0] != 0
    assert f"http://127.0.0.1:{bound[0]}" in done.stderr


def test_what_takes_long_before_it_listens_is_said_where_no_bars_are(monkeypatch: pytest.MonkeyPatch) -> None:
    uvicorn = pytest.importorskip("uvicorn", reason="needs the serve extra")
    monkeypatch.setattr(uvicorn.Server, "run", lambda server, sockets: None)

    def compiled(model: object, progress: Callable[[str, int, int], None]) -> None:
        for done in range(8):
            progress("compiling", done, 7)

    monkeypatch.setattr(pagedweight, "compile_kernels", compiled)  # as on a GPU
    done = RUNNER.invoke(app, ["serve", str(TINY), "--port", "0", "--engine", "transformers", "--device", "cpu"])
    assert done.exit_code == 0, done.output
    loading, compiling, _, serving = done.stderr.splitlines()
    assert loading == f"loading {TINY}"
    assert compiling == "compiling 7 kernels: about a minute, or seconds where Triton's cache has them"
    assert serving.startswith("serving tiny-qwen2-moe at http://")


def test_a_port_in_use_is_told_before_a_model_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fastapi", reason="needs the serve extra")
    monkeypatch.setattr(cli_serve, "_load", lambda *options: pytest.fail("loaded"))
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = str(other.getsockname()[1])
        done = RUNNER.invoke(app, ["serve", str(TINY), "--port", taken, "--engine", "transformers"])
    assert done.exit_code == 2
    assert done.stderr.splitlines() == [
        f"pagedweight: 127.0.0.1 port {taken}: Address already in use; give another --host or --port"
    ]


def test_a_host_that_is_not_this_machines_is_told() -> None:
    pytest.importorskip("fastapi", reason="needs the serve extra")
    for host in ("192.0.2.1", "no.such.host.invalid"):
        done = RUNNER.invoke(app, ["serve", str(TINY), "--host", host, "--port", "0", "--engine", "transformers"])
        assert done.exit_code == 2, done.output
        assert f"{host} port 0: " in done.stderr


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_vllm_that_is_not_there_is_asked_for_by_its_extra() -> None:
    done = RUNNER.invoke(app, ["serve", str(TINY), "--engine", "vllm"])
    assert done.exit_code == 2
    assert "pagedweight[vllm]" in done.stderr


@pytest.mark.parametrize(
    ("host", "alone"),
    [("127.0.0.1", True), ("localhost", True), ("::1", True), ("0.0.0.0", False), ("10.0.0.5", False), ("box", False)],
)
def test_it_is_known_which_addresses_others_reach(host: str, alone: bool) -> None:
    assert _loopback(host) is alone


@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_vllms_own_server_takes_its_place() -> None:
    pytest.importorskip("vllm", reason="needs vLLM: see docs/vllm.md")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "pagedweight", "serve", str(TINY)]
    small = ["--dtype", "float32", "--max-model-len", "64", "--enforce-eager", "--max-num-seqs", "2"]
    blocks = ["--block-size", "32", "--num-gpu-blocks-override", "64"]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    server = subprocess.Popen(
        [*command, "--engine", "vllm", "--port", str(port), "--", *small, *blocks], env=environment
    )
    try:
        reading = waited_for(server, f"http://127.0.0.1:{port}")
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(timeout=60)
    assert 2 <= reading.mean_bits <= 6
    assert sum(reading.memory.values()) > 0


def waited_for(server: subprocess.Popen, address: str) -> Reading:
    """The first reading after an answer: vLLM publishes figures with its steps."""
    body = json.dumps({"model": TINY.name, "prompt": "The old harbour", "max_tokens": 4}).encode()
    asked = urllib.request.Request(f"{address}/v1/completions", body, {"Content-Type": "application/json"})
    for _ in range(400):
        assert server.poll() is None
        try:
            urllib.request.urlopen(asked, timeout=60).close()
            return read(address)
        except (OSError, ValueError):
            time.sleep(1)
    raise AssertionError("the server did not answer")
