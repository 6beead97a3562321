"""`pagedweight top`: readings of a server's metrics, and the screen made of them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import StringIO
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("prometheus_client", reason="needs the serve extra")

from prometheus_client import CollectorRegistry, Gauge, generate_latest
from rich.console import Console
from rich.text import Text
from typer.testing import CliRunner

from pagedweight.cli import top
from pagedweight.cli.main import app
from pagedweight.cli.top_reading import Reading, parse
from pagedweight.cli.top_view import MOST_ROWS, View

RUNNER = CliRunner()
MIB = 2**20


def metrics(bits: float = 5.0, lowered: int = 3, layers: int = 4) -> str:
    """A server's answer, as serving/metrics.py names things."""
    lines = [f"pagedweight_mean_bits {bits}"]
    lines += [f'pagedweight_layer_bits{{layer="{at}"}} {bits}' for at in range(layers)]
    held = {"plane": 3 * MIB, "table": MIB, "kv": 2 * MIB, "free": 2 * MIB}
    lines += [f'pagedweight_bytes{{owner="{owner}"}} {size}' for owner, size in held.items()]
    lines += [f'pagedweight_linear_blocks{{bits="{width}"}} 8' for width in (2, 6)]
    lines += [f'pagedweight_moved_rows_total{{way="{way}"}} {lowered}' for way in ("lowered", "raised")]
    lines += [f'pagedweight_moved_bytes_total{{way="{way}"}} {MIB}' for way in ("released", "loaded")]
    lines += ["pagedweight_stalled_seconds_total 0.25", "pagedweight_shortfall_bytes 0"]
    lines += ["pagedweight_in_flight_bytes 0", "pagedweight_requests_running 7"]
    lines += [f'pagedweight_requests_total{{endpoint="/v1/{e}",status="200"}} 5' for e in ("a", "b")]
    return "\n".join(lines) + "\n"


@contextmanager
def answering(*answers: str | None) -> Iterator[str]:
    """The address of a server that gives these answers in turn, and the last one ever after; None is an error 500."""
    left = list(answers)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            text = left.pop(0) if len(left) > 1 else left[0]
            self.send_response(500 if text is None else 200)
            self.end_headers()
            self.wfile.write((text or "").encode())

        def log_message(self, *args: object) -> None:
            """Nothing on the tests' output."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def run(*arguments: str):
    return RUNNER.invoke(app, ["top", *arguments, "--interval", "0.1"])


def test_a_reading_is_what_the_server_says() -> None:
    reading = parse(metrics(), 1.0)
    assert reading.memory == {"planes": 3 * MIB, "tables": MIB, "KV cache": 2 * MIB, "free": 2 * MIB}
    assert reading.layer_bits == dict.fromkeys("0123", 5.0)
    assert (reading.lowered, reading.running, reading.answered, reading.stalled_seconds) == (3, 7, 10, 0.25)


def test_vllms_names_are_read_too() -> None:
    registry = CollectorRegistry()
    for name, value in {"mean_bits": 4.5, "resident_bytes": MIB, "paged_bytes": MIB, "kv_bytes": MIB}.items():
        labels = {"model_name": "paged", "engine": "0"}
        Gauge(f"pagedweight:{name}", "One figure.", list(labels), registry=registry).labels(**labels).set(value)
    reading = parse(generate_latest(registry).decode(), 0.0)
    assert reading.mean_bits == 4.5
    assert sum(reading.memory.values()) == 3 * MIB
    view = View("http://x", Console(file=StringIO(), width=100))
    view.add(reading)
    view.render()


@given(st.floats(0.1, 1e4), st.integers(0, 1000), st.integers(0, 1000))
def test_rates_are_by_the_second_and_never_negative(span: float, before: int, after: int) -> None:
    first, second = parse(metrics(lowered=before), 5.0), parse(metrics(lowered=after), 5.0 + span)
    assert second.rates(first)["lowered"] == pytest.approx(max(0, after - before) / span)
    assert set(first.rates(first).values()) == {0.0}


@given(st.integers(1, 100), st.integers(1, 90), st.sampled_from(["truecolor", None]))
def test_every_size_of_model_and_history_fits_the_screen(layers: int, readings: int, colours: str | None) -> None:
    console = Console(file=StringIO(), width=100, force_terminal=colours is not None, color_system=colours)
    view = View("http://127.0.0.1:8000", console)
    for at in range(readings):
        view.add(parse(metrics(bits=2 + at % 5, layers=layers), float(at)))
    console.print(view.render())
    lines = console.file.getvalue().splitlines()
    assert len(lines) <= MOST_ROWS + 20
    assert all(Text.from_ansi(line).cell_len <= 100 for line in lines)


def test_the_screen_shows_memory_layers_moves_and_stalls() -> None:
    with answering(metrics(6.0, 3), metrics(4.0, 13)) as address:
        done = run(address, "--readings", "2")
    assert done.exit_code == 0, done.output
    for word in (
        "4.00 mean bits",
        "7 requests running",
        "planes 3.0 MiB",
        "KV cache 2.0 MiB",
        "lowered",
        "stalled, ms",
    ):
        assert word in done.stdout, word
    assert "13" in done.stdout


@pytest.mark.parametrize("terminal", [False, True])
def test_what_was_shown_last_stays_when_readings_end(terminal: bool) -> None:
    """A terminal's own screen comes back with the command's, and takes what was drawn on it away."""
    with answering(metrics(6.0, 3), metrics(4.0, 13)) as address:
        environment = {"FORCE_COLOR": "1", "TERM": "xterm"} if terminal else {}
        done = RUNNER.invoke(app, ["top", address, "--interval", "0.1", "--readings", "2"], env=environment)
    left = done.stdout.rpartition("\x1b[?1049l")[2]  # back from the alternate screen
    assert ("\x1b[?1049h" in done.stdout) == terminal
    assert "4.00 mean bits" in Text.from_ansi(left).plain
    assert left.endswith("\n")


@pytest.mark.parametrize("picture", [False, True])
def test_what_was_shown_last_stays_after_ctrl_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, picture: bool) -> None:
    """Without --readings nothing else ends it."""
    read, left = top.read, [4.0, 6.0]

    def interrupted(address: str) -> Reading:
        if not left:
            raise KeyboardInterrupt
        return read(address)._replace(mean_bits=left.pop())

    monkeypatch.setattr(top, "read", interrupted)
    kept = tmp_path / "screen.svg"
    with answering(metrics()) as address:
        done = run(address, *(["--picture", str(kept)] if picture else []))
    assert done.exit_code == 130
    assert "4.00" in (kept.read_text() if picture else done.stdout)


def test_a_server_that_is_gone_is_waited_for() -> None:
    with answering(metrics(), None, metrics(3.0)) as address:
        done = run(address, "--readings", "3")
        assert done.exit_code == 0
        assert "3.00 mean bits" in done.stdout
    view = View("http://x", Console(file=StringIO(), width=100))
    view.add(parse(metrics(), 0.0))
    view.add("Connection refused")
    console = Console(file=StringIO(), width=140)
    console.print(view.render())
    assert "Connection refused" in console.file.getvalue()


def test_json_has_a_line_for_each_reading_and_a_picture_is_a_picture(tmp_path: Path) -> None:
    with answering(metrics()) as address:
        lines = run(address, "--json", "--readings", "2").stdout.splitlines()
        assert [json.loads(line)["mean_bits"] for line in lines] == [5.0, 5.0]
        assert set(json.loads(lines[0])) == set(Reading._fields)
        done = run(address, "--readings", "2", "--picture", str(tmp_path / "top.svg"))
    assert done.exit_code == 0, done.output
    assert "url(http" not in (tmp_path / "top.svg").read_text()  # no fonts from elsewhere
    picture = ElementTree.parse(tmp_path / "top.svg").getroot()
    assert "5.00\xa0mean\xa0bits" in "".join(picture.itertext())


def test_what_does_not_answer_is_one_sentence(tmp_path: Path) -> None:
    with answering("other_metric 1\n") as address:
        told = {run(address).stderr: "quantized model"}
        told[run(address, "--picture", "top.png").stderr] = ".svg"
    told[run("localhost:8000").stderr] = "http://HOST:PORT"
    told[run(address).stderr] = "refused"
    with answering(None) as address:
        told[run(address).stderr] = "500"
    for sentence, word in told.items():
        assert word in sentence
        assert sentence.count("\n") == 1
