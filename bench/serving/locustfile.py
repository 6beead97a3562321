"""Clients of `pagedweight serve` for locust, a load generator (pip install locust):

    pagedweight serve pagedweight/assets/tiny-qwen2-moe --budget 16MiB --dtype float32 --port 8000
    locust -f bench/serving/locustfile.py --host http://127.0.0.1:8000 --headless -u 64 -r 64 -t 60s --json

Most ask for completions, whole or streamed; some send what a server must refuse. Every answer is checked: a refusal
that is no 4xx, a stream without an end, or text of another length counts as a failure.
"""

from __future__ import annotations

import json
import random

from locust import FastHttpUser, constant, task

PROMPTS = (
    "The old harbour was built in the nineteenth century, and",
    "In the final match of the season",
    "The species was first described",
    "After the war, the regiment returned",
)
REFUSED = (
    ({"prompt": 7}, 400),
    ({"prompt": "x", "max_tokens": 10**9}, 400),
    ({"prompt": "x", "temperature": "hot"}, 400),
    ({"prompt": "x", "model": "another"}, 404),
    ({"prompt": "x" * (2**20 + 1)}, 413),
)


class Reader(FastHttpUser):
    """One client that asks again as soon as it has an answer."""

    wait_time = constant(0)

    @task(6)
    def completion(self) -> None:
        with self.client.post("/v1/completions", json=asked(), name="completion", catch_response=True) as answer:
            if answer.status_code != 200:
                answer.failure(f"{answer.status_code}: {answer.text[:200]}")
            elif answer.json()["usage"]["completion_tokens"] < 1:
                answer.failure("no token")

    @task(3)
    def streamed(self) -> None:
        body = asked() | {"stream": True}
        with self.client.post("/v1/completions", json=body, name="streamed", catch_response=True) as answer:
            lines = [line for line in answer.text.splitlines() if line.startswith("data: {")]
            if answer.status_code != 200 or not lines:
                answer.failure(f"{answer.status_code}: {answer.text[:200]}")
            elif "usage" not in json.loads(lines[-1].removeprefix("data: ")):
                answer.failure("the stream has no end")

    @task(1)
    def refused(self) -> None:
        body, status = random.choice(REFUSED)
        with self.client.post("/v1/completions", json=body, name="refused", catch_response=True) as answer:
            if answer.status_code == status and "error" in answer.json():
                answer.success()
            else:
                answer.failure(f"{answer.status_code} instead of {status}")


def asked() -> dict[str, object]:
    return {
        "prompt": random.choice(PROMPTS),
        "max_tokens": random.randint(4, 48),
        "temperature": random.choice((0, 0.7, 1.0)),
        "top_p": random.choice((0.9, 1.0)),
    }
