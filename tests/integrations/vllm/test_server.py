"""The real server on a CPU: the demo model's folder, many clients that stream, and figures on /metrics."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vLLM: see docs/vllm.md")
pytest.importorskip("uvicorn", reason="vLLM's server needs it")

import requests
from openai import AsyncOpenAI

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

CLIENTS, TOKENS = 32, 150
# 32 requests of about 160 tokens fill 160 blocks of 32; the planes above 2 bits want 13.
ARGUMENTS = [
    *("--dtype", "float32", "--max-model-len", "256", "--max-num-batched-tokens", "256", "--enforce-eager"),
    *("--max-num-seqs", "32", "--block-size", "32"),
    *("--num-gpu-blocks-override", "168", "--no-enable-prefix-caching"),
    *("--additional-config", '{"pagedweight": {"offload_free_blocks": 2, "reload_free_blocks": 4}}'),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """Address and log of a server of the demo model's folder."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = str(files("pagedweight") / "assets" / "tiny-qwen2-moe")
    log = tmp_path_factory.mktemp("server") / "log"
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    # What `vllm serve` starts; that command itself fails where vLLM comes from a distribution of another name.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", folder, "--port", str(port)]
    with (
        log.open("w") as sink,
        subprocess.Popen([*command, *ARGUMENTS], stdout=sink, stderr=sink, env=environment) as process,
    ):
        try:
            wait_until_ready(process, f"http://127.0.0.1:{port}", log)
            yield f"http://127.0.0.1:{port}", log
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


def wait_until_ready(process: subprocess.Popen, address: str, log: Path) -> None:
    for _ in range(240):
        assert process.poll() is None, log.read_text()[-4000:]
        try:
            if requests.get(f"{address}/health", timeout=5).ok:
                return
        except (requests.ConnectionError, requests.Timeout):  # some versions take connections before they answer
            time.sleep(1)
    raise AssertionError(log.read_text()[-4000:])


async def stream(client: AsyncOpenAI, model: str, number: int) -> tuple[int, str]:
    """Chunks that came, and why it ended."""
    prompt = f"{number}. In the year {1000 + number}"
    chunks, reason = 0, ""
    events = await client.completions.create(
        model=model, prompt=prompt, max_tokens=TOKENS, stream=True, extra_body={"ignore_eos": True}
    )
    async for event in events:
        chunks += 1
        reason = event.choices[0].finish_reason or reason
    return chunks, reason


async def stream_all(address: str) -> list[tuple[int, str]]:
    async with AsyncOpenAI(base_url=f"{address}/v1", api_key="none", timeout=200) as client:
        model = (await client.models.list()).data[0].id
        return await asyncio.gather(*(stream(client, model, number) for number in range(CLIENTS)))


def figure(address: str, name: str) -> float:
    found = re.search(rf"^pagedweight:{name}\{{.*\}} (\S+)$", requests.get(f"{address}/metrics", timeout=5).text, re.M)
    assert found, f"/metrics has no pagedweight:{name}"
    return float(found[1])


def test_every_client_is_served_to_the_end_while_bits_fall_and_rise(server: tuple[str, Path]) -> None:
    address, log = server
    answers = asyncio.run(stream_all(address))
    assert [reason for _, reason in answers] == ["length"] * CLIENTS
    assert all(chunks > TOKENS // 2 for chunks, _ in answers), "answers came in few pieces"
    assert figure(address, "blocks_given") > 0
    lowest = figure(address, "lowest_mean_bits")
    assert lowest < 6
    asyncio.run(stream_all(address))
    assert figure(address, "raised") > 0
    assert "expert weights are giving way" in log.read_text()
