"""A few thousand steps of the runtime's state machine; scripts/fuzz_runtime.py runs as many as one likes."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers", reason="needs the hf extra")

from hypothesis import Phase, settings

from tests.fuzz.runtime_machine import RuntimeMachine

TestRuntimeMachine = RuntimeMachine.TestCase
TestRuntimeMachine.settings = settings(
    max_examples=40,
    stateful_step_count=50,
    deadline=None,
    phases=[Phase.generate],  # shrinking such programs takes minutes; the script's --shrink does it
)
