"""The server as clients see it: OpenAI's own client, many at once, nonsense, metrics, and the admin's view."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event, current_thread

import pytest

pytest.importorskip("fastapi", reason="needs the serve extra")
pytest.importorskip("prometheus_client", reason="needs the serve extra")
pytest.importorskip("openai", reason="needs the serve extra")
pytest.importorskip("psutil", reason="continuous batching needs psutil")

import httpx
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import BadRequestError, NotFoundError, OpenAI
from prometheus_client.parser import text_string_to_metric_families

from pagedweight.serving.engine import Engine
from tests.serving.support import ADMIN_TOKEN, LIMITS, engine, served

PROMPT = "The old harbour was built in the"
KEY = "the-key-of-a-user"
WITH_KEY = {"Authorization": f"Bearer {KEY}"}
ADMIN = {"Authorization": f"Bearer {ADMIN_TOKEN}"}
CLIENTS = 64


@pytest.fixture(scope="module")
def running() -> Engine:
    """Continuous batching."""
    return engine(batched=True)


@pytest.fixture(scope="module")
def address(running: Engine) -> Iterator[str]:
    with served(running) as at:
        yield at


@pytest.fixture(scope="module")
def one_by_one() -> Engine:
    return engine(batched=False)


@pytest.fixture(scope="module")
def expected(one_by_one: Engine) -> str:
    """Eight greedy tokens of the model by itself."""
    ids = one_by_one.tokenizer(PROMPT, return_tensors="pt")
    answer = one_by_one.model.generate(**ids, max_new_tokens=8, do_sample=False)
    return one_by_one.tokenizer.decode(answer[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)


@pytest.fixture(scope="module")
def alone(one_by_one: Engine, expected: str) -> Iterator[str]:
    """The address of a server that takes one request after the other, from whoever has the key."""
    with served(one_by_one, api_key=KEY) as at:
        yield at


def client(address: str) -> OpenAI:
    return OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0)


def metrics(address: str) -> dict[str, float]:
    """Every sample by its name and labels' values."""
    families = text_string_to_metric_families(httpx.get(f"{address}/metrics").text)
    return {" ".join([s.name, *s.labels.values()]): s.value for family in families for s in family.samples}


@pytest.mark.parametrize("server", ["address", "alone"])
def test_openais_client_gets_the_models_own_tokens(server: str, expected: str, request: pytest.FixtureRequest) -> None:
    openai = client(request.getfixturevalue(server))
    assert [model.id for model in openai.models.list()] == ["tiny"]
    whole = openai.completions.create(model="tiny", prompt=PROMPT, max_tokens=8, temperature=0)
    assert whole.choices[0].text == expected
    assert whole.usage.completion_tokens == 8
    parts = list(openai.completions.create(model="tiny", prompt=PROMPT, max_tokens=8, temperature=0, stream=True))
    assert "".join(part.choices[0].text or "" for part in parts) == expected
    assert parts[-1].choices[0].finish_reason == "length"


def test_many_clients_at_once_are_all_answered(address: str, expected: str) -> None:
    """Half of them greedy: whoever shares a batch with others' sampling still gets the model's own tokens."""

    def ask(number: int) -> tuple[int, str]:
        body = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0 if number % 2 else 1.5}
        answer = httpx.post(f"{address}/v1/completions", json=body, timeout=100)
        return answer.status_code, answer.json()["choices"][0]["text"]

    with ThreadPoolExecutor(CLIENTS) as clients:
        answers = list(clients.map(ask, range(CLIENTS)))
    assert {status for status, _ in answers} == {200}
    assert all(expected.startswith(text) for _, text in answers[1::2])
    assert len({text for _, text in answers[::2]}) > 1


@pytest.mark.parametrize(
    ("body", "status", "word"),
    [
        ({"prompt": "x", "max_tokens": 25}, 400, "at most 24"),
        ({"prompt": "x", "max_tokens": True}, 400, "max_tokens"),
        ({"prompt": "x", "temperature": -1}, 400, "temperature"),
        ({"prompt": "x", "top_p": 0}, 400, "top_p"),
        ({"prompt": "x", "n": 2}, 400, "n is not served"),
        ({"prompt": "x", "generation_config": "{}"}, 400, "generation_config"),
        ({"prompt": ["x"]}, 400, "prompt"),
        ({"prompt": "x " * 6000, "max_tokens": 8}, 400, "tokens"),  # beyond the context
        ({"prompt": "x", "model": "another"}, 404, "another"),
        ({}, 400, "prompt"),
        ([], 400, "list"),
    ],
)
def test_what_is_wrong_is_said_in_openais_form(address: str, body: object, status: int, word: str) -> None:
    answer = httpx.post(f"{address}/v1/completions", json=body)
    assert answer.status_code == status, answer.text
    assert word in answer.json()["error"]["message"]


def test_bodies_that_are_no_json_or_too_large_are_refused(address: str) -> None:
    url = f"{address}/v1/completions"
    assert httpx.post(url, content=b"{").status_code == 400
    assert httpx.post(url, content=b"[" * 60000).status_code == 400  # deeper than any parser goes
    assert httpx.post(url, content=b"\xff\xfe").status_code == 400
    assert httpx.post(url, content=b" " * (LIMITS.body_bytes + 1)).status_code == 413
    chunked = (b" " * 2**14 for _ in range(8))
    assert httpx.post(url, content=chunked).status_code == 413
    for path in ("/v1/nothing", "/load_model", "/reset", "/docs"):
        assert httpx.post(f"{address}{path}").status_code == 404


def test_errors_are_those_that_openais_client_knows(address: str) -> None:
    with pytest.raises(NotFoundError):
        client(address).completions.create(model="other", prompt="x")
    with pytest.raises(BadRequestError, match=r"chat.template"):
        client(address).chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}])


@pytest.mark.parametrize("temperature", [5e-324, 1e-45, 1e-38, 1e-3])
def test_hardly_any_temperature_is_none(address: str, expected: str, temperature: float) -> None:
    """Logits over such numbers are infinite, which would end the thread that batches, and everybody's requests."""
    body = {"prompt": PROMPT, "max_tokens": 4, "temperature": temperature}
    answer = httpx.post(f"{address}/v1/completions", json=body, timeout=100)
    assert answer.status_code == 200, answer.text
    assert expected.startswith(answer.json()["choices"][0]["text"])
    assert httpx.get(f"{address}/health").status_code == 200


@pytest.mark.parametrize("template", ["{{ raise_exception('roles must alternate') }}", "{{ messages[0].none.none }}"])
def test_what_a_chat_template_refuses_is_the_clients_to_mend(
    address: str, running: Engine, template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running.tokenizer, "chat_template", template)
    answer = httpx.post(f"{address}/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]})
    assert answer.status_code == 400, answer.text
    assert "chat template does not take" in answer.json()["error"]["message"]


def test_a_failure_inside_is_told_as_json_without_its_reason(
    address: str, running: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def failing(body: dict) -> int:
        raise KeyError("a secret of the server")

    monkeypatch.setattr(running, "tokenized", failing)
    answer = httpx.post(f"{address}/v1/completions", json={"prompt": "x"})
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "server_error"
    assert "secret" not in answer.text


def test_while_a_long_prompt_is_tokenized_others_are_answered(
    address: str, running: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, on a thread beside the event loop, by the request that waits for it."""
    began, may_go, threads, call = Event(), Event(), [], type(running.tokenizer).__call__

    def slow(tokenizer: object, *args: object, **kwargs: object) -> object:
        threads.append(current_thread().name)
        began.set()
        assert may_go.wait(60)
        return call(tokenizer, *args, **kwargs)

    monkeypatch.setattr(type(running.tokenizer), "__call__", slow)
    with ThreadPoolExecutor(1) as clients:
        body = {"prompt": PROMPT, "max_tokens": 2}
        asked = clients.submit(httpx.post, f"{address}/v1/completions", json=body, timeout=100)
        assert began.wait(60)
        assert httpx.get(f"{address}/health", timeout=20).status_code == 200
        may_go.set()
        assert asked.result().status_code == 200
    assert [name.partition("_")[0] for name in threads] == ["tokenizing"]


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FIELDS = ("prompt", "messages", "model", "temperature", "top_p", "stop", "seed", "stream", "n", "frequency_penalty")
BODIES = st.dictionaries(st.sampled_from(FIELDS), ANYTHING | st.sampled_from([0, 1, "x", True]), max_size=5)


@given(BODIES, st.sampled_from(["completions", "chat/completions"]))
@settings(max_examples=12, deadline=None)
def test_no_request_is_the_servers_fault(address: str, body: dict, endpoint: str) -> None:
    sent = json.dumps({**body, "max_tokens": 1}, ensure_ascii=True)
    answer = httpx.post(f"{address}/v1/{endpoint}", content=sent, timeout=100)
    assert answer.status_code < 500, (body, answer.text)
    assert httpx.get(f"{address}/health").json() == {"status": "ok"}


def test_metrics_account_for_the_arena(address: str, running: Engine) -> None:
    httpx.post(f"{address}/v1/completions", json={"prompt": PROMPT, "max_tokens": 2})
    seen = metrics(address)
    owners = [value for name, value in seen.items() if name.startswith("pagedweight_bytes ")]
    assert sum(owners) == running.paged.arena.memory.numel()
    blocks = [value for name, value in seen.items() if name.startswith("pagedweight_linear_blocks ")]
    assert sum(blocks) == running.paged.layout.rows
    layers = [value for name, value in seen.items() if name.startswith("pagedweight_layer_bits ")]
    assert sum(layers) / len(layers) == pytest.approx(running.paged.glance().bits.mean())
    assert seen["pagedweight_requests_total /v1/completions 200"] >= 1
    assert seen["pagedweight_requests_running"] == 0
    assert not [name for name in seen if "nothing" in name]  # no label from a client's own words


def test_the_admins_view_wants_the_token_and_changes_nothing(address: str, running: Engine) -> None:
    for headers in ({}, {"Authorization": "Bearer x"}, {"Authorization": f"Basic {ADMIN_TOKEN}"}):
        for path in ("widths", "plan", "explain?layer=0&expert=0&projection=down"):
            assert httpx.get(f"{address}/admin/{path}", headers=headers).status_code == 401
    widths = httpx.get(f"{address}/admin/widths", headers=ADMIN).json()
    told = [b for layer in widths["layers"] for pair in zip(layer["gate_up"], layer["down"], strict=True) for b in pair]
    assert told == running.paged.glance().bits.tolist()
    plan = httpx.get(f"{address}/admin/plan", headers=ADMIN).json()
    assert sum(plan["bytes_by_owner"].values()) == running.paged.arena.memory.numel()
    assert "offload at" in plan["explanation"]
    one = httpx.get(f"{address}/admin/explain?layer=1&expert=2&projection=down", headers=ADMIN)
    assert "layers.1.experts.2.down" in one.json()["explanation"]
    assert httpx.get(f"{address}/admin/explain?layer=1&expert=99&projection=down", headers=ADMIN).status_code == 404
    assert httpx.post(f"{address}/admin/widths", headers=ADMIN).status_code == 405


def test_one_by_one_a_cache_goes_back_to_the_arena(alone: str) -> None:
    body = {"prompt": PROMPT, "max_tokens": 4}
    assert httpx.post(f"{alone}/v1/completions", json=body, headers=WITH_KEY).status_code == 200
    assert metrics(alone)["pagedweight_bytes kv"] == 0


def test_what_batching_cannot_do_apart_is_refused_there_alone(address: str, alone: str) -> None:
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "stop": " "}
    refused = httpx.post(f"{address}/v1/completions", json=body)
    assert refused.status_code == 400
    assert "--batching off" in refused.json()["error"]["message"]
    answer = httpx.post(f"{alone}/v1/completions", json=body, headers=WITH_KEY)
    assert answer.json()["usage"]["completion_tokens"] < 8


def test_a_worker_that_died_is_seen_and_replaced(address: str, running: Engine) -> None:
    body = {"prompt": PROMPT, "max_tokens": 2}
    assert httpx.post(f"{address}/v1/completions", json=body).status_code == 200
    running.state.get_manager("tiny", use_cb=True)._cb.background_thread_status.record_fatal_error(RuntimeError("gone"))
    assert httpx.get(f"{address}/health").status_code == 503
    assert httpx.post(f"{address}/v1/completions", json=body, timeout=100).status_code == 200
    assert httpx.get(f"{address}/health").status_code == 200


def test_a_key_is_asked_for_where_there_is_one(alone: str) -> None:
    url, body = f"{alone}/v1/completions", {"prompt": "x", "max_tokens": 1}
    assert httpx.post(url, json=body).status_code == 401
    assert httpx.post(url, json=body, headers=ADMIN).status_code == 401
    assert httpx.post(url, json=body, headers=WITH_KEY).status_code == 200
    assert httpx.get(f"{alone}/health").status_code == 200


def test_two_servers_in_one_process_do_not_share_metrics(address: str, alone: str) -> None:
    before = metrics(address).get("pagedweight_requests_total /v1/models 200", 0)
    httpx.get(f"{alone}/v1/models", headers=WITH_KEY)
    assert metrics(alone)["pagedweight_requests_total /v1/models 200"] >= 1
    assert metrics(address).get("pagedweight_requests_total /v1/models 200", 0) == before
