"""Every command with what it cannot take: one sentence on stderr, nothing on stdout, exit code 2."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("transformers", reason="needs the hf extra")
pytest.importorskip("matplotlib", reason="needs the plots extra")
pytest.importorskip("plotly", reason="needs the plots extra")
pytest.importorskip("fastapi", reason="needs the serve extra")
pytest.importorskip("prometheus_client", reason="needs the serve extra")

import pagedweight
from pagedweight.cli.main import EXIT_CODES, app

TINY = Path(pagedweight.__file__).parent / "assets/tiny-qwen2-moe"
RUNNER = CliRunner()
# Commands that read a folder with pages, FOLDER here; of quantize it is the dense model's.
READING = {
    "inspect": "inspect FOLDER --verify",
    "plan": "plan FOLDER --free 1MiB",
    "replay": "replay words.txt FOLDER",
    "bench": "bench FOLDER --device cpu --steps 1",
    "convert": "convert FOLDER new --codebook 4=lut16",
    "calibrate": "calibrate FOLDER --data words.txt --device cpu",
    "eval": "eval FOLDER --task t=words.txt --device cpu --out new.json",
    "serve": "serve FOLDER --port 0 --engine transformers --device cpu",
    "quantize": "quantize FOLDER new --device cpu",
}
FOLDERS = ("no/such/folder", "empty", "words.txt", "half", "cut")


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders that are no checkpoint, each in its own way, and files that are not what a command wants."""
    work = tmp_path_factory.mktemp("work")
    (work / "empty").mkdir()
    (work / "words.txt").write_text("a few words " * 200, encoding="utf-8")
    (work / "nothing.txt").write_text("", encoding="utf-8")
    (work / "bytes.txt").write_bytes(bytes(range(256)))
    (work / "half.jsonl").write_text('{"trace_version": 3}\n{"verb":\n', encoding="utf-8")
    (work / "list.jsonl").write_text("[1, 2]\n", encoding="utf-8")
    for name in ("half", "cut"):
        shutil.copytree(TINY, work / name)
    (work / "half" / "pagedweight" / "metadata.json").unlink()  # what a killed quantize leaves
    pages = next((work / "cut" / "pagedweight").glob("pages-*.safetensors"))
    pages.write_bytes(pages.read_bytes()[:-1])
    return work


def refusal(line: str, work: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The sentence with which a line's command is refused; TINY in it is the model that ships."""
    monkeypatch.chdir(work)
    done = RUNNER.invoke(app, [str(TINY) if word == "TINY" else word for word in line.split()])
    assert done.exit_code == 2, done.output
    assert isinstance(done.exception, SystemExit)
    assert done.stdout == ""
    # serve says first what it does: what it imports takes seconds
    (sentence,) = [told for told in done.stderr.splitlines() if not told.startswith("loading ")]
    assert sentence.startswith("pagedweight: ")
    return sentence


@pytest.mark.parametrize("command", sorted(READING))
@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_that_is_no_checkpoint(command: str, folder: str, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = refusal(READING[command].replace("FOLDER", folder), work, monkeypatch)
    assert folder in told
    assert not (work / "new").exists()


@pytest.mark.parametrize("file", ["missing.txt", "empty", "nothing.txt", "bytes.txt"])
@pytest.mark.parametrize(
    "line",
    [
        "replay FILE TINY",
        "report FILE -o new.html",
        "calibrate TINY --data FILE --device cpu",
        "quantize TINY new --data FILE --level balanced --device cpu",
        "eval TINY --task t=FILE --device cpu --out new.json",
        "serve TINY --api-key-file FILE --port 0 --engine transformers",
        "serve TINY --admin-token-file FILE --port 0 --engine transformers",
    ],
)
def test_a_file_that_is_not_what_is_wanted(line: str, file: str, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert file in refusal(line.replace("FILE", file), work, monkeypatch)


@pytest.mark.parametrize("file", ["words.txt", "half.jsonl", "list.jsonl"])
@pytest.mark.parametrize("line", ["replay FILE TINY", "report FILE -o new.html"])
def test_a_file_that_is_no_trace(line: str, file: str, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert file in refusal(line.replace("FILE", file), work, monkeypatch)


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("demo --output words.txt", "words.txt"),  # a file in place of a folder
        ("demo --trace none/run.jsonl --tokens 16", "none/run.jsonl"),  # in a folder that is not there
        ("demo --trace empty", "empty"),
        ("demo --budget 1KiB", "1024"),
        ("demo --tokens x", "--tokens"),
        ("quantize TINY words.txt", "words.txt"),
        ("quantize TINY new --level worst", "worst"),
        ("quantize TINY new --widths a,b", "--widths a,b"),
        ("quantize TINY new --widths 99", "99"),
        ("quantize TINY new --codebook 6", "WIDTH=NAME"),
        ("quantize TINY new --keep-statistics new", "--data"),
        ("calibrate TINY", "--data"),
        ("calibrate TINY --data words.txt --method guess", "guess"),
        ("calibrate TINY --data words.txt --heads three", "three"),
        ("calibrate TINY --data words.txt --device abacus", "abacus"),
        ("calibrate TINY --data words.txt --statistics empty --device cpu", "empty"),
        ("calibrate TINY --data words.txt --model no/such/model --device cpu", "no/such/model"),
        ("convert TINY new --codebook 4=gold", "gold"),
        ("convert TINY new --codebook 9=lut16", "9"),
        ("convert TINY TINY --codebook 4=lut16", "tiny-qwen2-moe"),
        ("convert TINY empty/../words.txt --codebook 4=lut16", "words.txt"),
        ("plan TINY --free lots", "lots"),
        ("plan TINY --free 1MiB --most-damage -1", "damage"),
        ("plan TINY --free 1MiB --pin 99.1=3", "99"),
        ("plan TINY --free 1MiB --explain x", "--explain"),
        ("replay half.jsonl", "Missing argument"),
        ("inspect TINY --picture map.gif", ".png or .svg"),
        ("inspect TINY --picture none/map.png", "none/map.png"),
        ("report half.jsonl -o empty", "empty"),
        ("eval TINY", "--task"),
        ("eval TINY --task words.txt", "NAME=FILE"),
        ("eval TINY --task t=words.txt --budget 99 --out new.json", "99"),
        ("eval TINY --task t=words.txt --method magic --out new.json", "magic"),
        ("eval TINY --task t=words.txt --dtype int3 --out new.json", "int3"),
        ("eval TINY --task t=words.txt --device abacus --out new.json", "abacus"),
        ("eval TINY --task t=words.txt --device cpu --out empty", "empty"),
        ("eval TINY --task t=words.txt --device cpu --out words.txt", "words.txt is no record"),
        ("eval TINY --task t=words.txt --device cpu --out list.jsonl", "list.jsonl is no record"),
        ("eval TINY --task t=words.txt --device cpu --reference no/such/model --out new.json", "no/such/model"),
        ("bench TINY --dtype int3", "int3"),
        ("bench TINY --device abacus", "abacus"),
        ("bench TINY --device cuda:99", "cuda:99"),
        ("bench TINY --batch 0", "--batch"),
        ("bench TINY --device cpu --prompt 99999", "99999"),
        ("serve TINY --engine none", "none"),
        ("serve TINY --dtype int3 --engine transformers --port 0", "int3"),
        ("serve TINY --device abacus --engine transformers --port 0", "abacus"),
        ("serve TINY --budget 1KiB --engine transformers --port 0", "1024"),
        ("serve TINY --trace none/run.jsonl --engine transformers --port 0 --device cpu", "none/run.jsonl"),
        ("top ftp://here", "http://HOST:PORT"),
        ("top http://127.0.0.1:9", "refused"),
        ("top http://127.0.0.1:99999", "99999"),
        ("top http://", "http://"),
        ("top http://[::", "http://[::"),
        ("top --picture top.png", ".svg"),
        ("doctor more", "more"),
        ("nothing", "nothing"),
        ("--nothing", "--nothing"),
    ],
)
def test_a_value_that_will_not_do(line: str, word: str, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert word in refusal(line, work, monkeypatch)


def test_a_port_in_use(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        told = refusal(f"serve TINY --port {taken} --engine transformers --device cpu", work, monkeypatch)
        assert f"port {taken}: Address already in use" in told
        other.settimeout(0)  # it takes connections, and never answers
        monkeypatch.setattr("pagedweight.cli.top.ANSWER_SECONDS", 0.2)
        assert "timed out" in refusal(f"top http://127.0.0.1:{taken}", work, monkeypatch)


def test_every_command_is_tried_and_its_exit_codes_are_said() -> None:
    names = {command.name or command.callback.__name__ for command in app.registered_commands}
    assert names == {*READING, "demo", "report", "top", "doctor"}
    assert "2 bad input" in EXIT_CODES
