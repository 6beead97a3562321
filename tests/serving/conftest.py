"""What several files of tests of `pagedweight serve` begin from."""

from __future__ import annotations

from typing import NoReturn

import pytest

from pagedweight.cli import serve as cli_serve


@pytest.fixture
def vllm_started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Commands of vLLM's servers that would have been started; vLLM and a GPU count as there."""
    started: list[list[str]] = []
    monkeypatch.setattr(cli_serve, "_vllm_serves", lambda: True)
    monkeypatch.setattr(cli_serve, "require_extras", lambda *extras: None)

    def replaced(path: str, command: list[str]) -> NoReturn:
        started.append(command)
        raise SystemExit

    monkeypatch.setattr("os.execv", replaced)
    return started
