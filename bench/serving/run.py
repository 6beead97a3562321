"""64 clients against `pagedweight serve` of the model that ships, by locust:

    pip install locust
    python -m bench.serving.run --out bench/results/cpu-serving.json --picture docs/top.svg

Starts the server, lets locustfile.py's clients ask for a while, and writes what they and /metrics say; the picture is
`pagedweight top`'s screen shortly before the clients leave.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import torch
import transformers

import pagedweight
from pagedweight.cli.top import read

TINY = Path(pagedweight.__file__).parent / "assets/tiny-qwen2-moe"
CLIENTS = Path(__file__).with_name("locustfile.py")
START_SECONDS = 120


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(budget: str, port: int, device: str) -> subprocess.Popen:
    """A server that answers; RuntimeError when it does not within START_SECONDS."""
    command = [sys.executable, "-m", "pagedweight", "serve", str(TINY)]
    options = ["--budget", budget, "--port", str(port), "--device", device]
    server = subprocess.Popen([*command, *options, *(["--dtype", "float32"] if device == "cpu" else [])])
    for _ in range(START_SECONDS):
        time.sleep(1)
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
        except (urllib.error.URLError, OSError):
            continue
        return server
    server.terminate()
    raise RuntimeError(f"the server did not answer within {START_SECONDS} s")


def load(address: str, clients: int, seconds: int) -> list[dict[str, Any]]:
    """What locust says of each kind of request, without its histograms."""
    command = [sys.executable, "-m", "locust", "-f", str(CLIENTS), "--host", address, "--headless", "--json"]
    rates = ["-u", str(clients), "-r", str(clients), "-t", f"{seconds}s", "--skip-log", "--exit-code-on-error", "0"]
    done = subprocess.run([*command, *rates], stdout=subprocess.PIPE, check=True)
    return [
        {
            "name": kind["name"],
            "requests": kind["num_requests"],
            "failures": kind["num_failures"],
            "mean_ms": round(kind["total_response_time"] / max(1, kind["num_requests"]), 1),
            "max_ms": round(kind["max_response_time"], 1),
        }
        for kind in json.loads(done.stdout)
    ]


def watch(address: str, seconds: int, picture: Path) -> subprocess.Popen:
    """`pagedweight top` for some seconds, which then keeps its screen."""
    readings = ["--interval", "1", "--readings", str(seconds), "--picture", str(picture)]
    return subprocess.Popen([sys.executable, "-m", "pagedweight", "top", address, *readings])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget", default="9MiB")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--picture", type=Path, help="keep the screen of top here, as .svg")
    options = parser.parse_args()
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    server = start(options.budget, port, options.device)
    try:
        before = read(address)
        watching = options.picture and watch(address, options.seconds * 3 // 4, options.picture)
        kinds = load(address, options.clients, options.seconds)
        if watching:
            watching.wait()
        after = read(address)
        health = json.loads(urllib.request.urlopen(f"{address}/health").read())
    finally:
        server.terminate()
        server.wait(timeout=60)
    settings = {name: str(value) for name, value in vars(options).items() if value is not None}
    result = {
        "command": f"python -m bench.serving.run --out {options.out}",
        "settings": settings,
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, load {os.getloadavg()[1]:.1f} in the last 5 minutes",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "requests": kinds,
        "health_after": health,
        "metrics_before": before._asdict(),
        "metrics_after": after._asdict(),
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for kind in kinds:
        print(kind)


if __name__ == "__main__":
    main()
