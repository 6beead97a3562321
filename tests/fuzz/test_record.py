"""What the fuzzing scripts leave behind: a record that adds up, and the command that runs again what failed."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="needs the hf extra")

from scripts import fuzz_record, fuzz_runtime


def test_pieces_that_end_at_once_are_all_in_the_record_and_add_up_by_state_of_the_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "results" / "fuzz.json"
    monkeypatch.setattr(sys, "argv", ["fuzz", "--seed", "1", "--out", str(path)])

    def add(steps: int) -> None:
        fuzz_record.add_piece(path, "python scripts/fuzz.py", {"steps": steps, "seconds": 0.5, "findings": 0})

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(add, range(20)))
    state = fuzz_record.sources()
    monkeypatch.setattr(fuzz_record, "sources", lambda: "another")
    add(7)
    record = json.loads(path.read_text())
    assert sorted(piece["steps"] for piece in record["pieces"]) == sorted([*range(20), 7])
    assert {piece["command"] for piece in record["pieces"]} == {"python scripts/fuzz.py --seed 1 --out fuzz.json"}
    assert record["sums"] == {
        state: {"pieces": 20, "steps": 190, "seconds": 10.0, "findings": 0},
        "another": {"pieces": 1, "steps": 7, "seconds": 0.5, "findings": 0},
    }


def test_a_seed_that_fails_is_named_with_its_command_and_stands_in_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def run_seed(number: int, *, shrink: bool) -> int:
        assert number < 3, "the arena lost a frame"
        return 10

    path = tmp_path / "fuzz.json"
    monkeypatch.setattr(fuzz_runtime, "run_seed", run_seed)
    monkeypatch.setattr(sys, "argv", ["fuzz", "--seed", "1", "--out", str(path)])
    with pytest.raises(AssertionError, match="lost a frame"):
        fuzz_runtime.main()
    assert "seed 3 failed; again: python scripts/fuzz_runtime.py --seed 3 --steps 1" in capsys.readouterr().out
    (piece,) = json.loads(path.read_text())["pieces"]
    assert (piece["first_seed"], piece["seeds"], piece["steps"], piece["findings"]) == (1, 2, 20, 1)


def test_who_ends_a_piece_by_hand_has_found_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_seed(number: int, *, shrink: bool) -> int:
        if number == 3:
            raise KeyboardInterrupt
        return 10

    path = tmp_path / "fuzz.json"
    monkeypatch.setattr(fuzz_runtime, "run_seed", run_seed)
    monkeypatch.setattr(sys, "argv", ["fuzz", "--seed", "1", "--out", str(path)])
    with pytest.raises(KeyboardInterrupt):
        fuzz_runtime.main()
    (piece,) = json.loads(path.read_text())["pieces"]
    assert (piece["seeds"], piece["steps"], piece["findings"]) == (2, 20, 0)
