"""A recorded run replays bit for bit; another policy or version does not replay at all."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedweight.runtime.kv import KVState
from pagedweight.runtime.planner import Queue, plan_raise, plan_step
from pagedweight.runtime.planner_trace import TraceWriter, digest, replay
from pagedweight.runtime.planner_trace_lines import TraceError
from tests.runtime.planner_support import Problem, carried_out, parent_problem, problems


def recorded(problem: Problem, seed: int) -> list[str]:
    """A run of random pressure, with lowering, idle and raising steps."""
    rng = np.random.default_rng(seed)
    file, table, queue = io.StringIO(), problem.table, Queue()
    writer = TraceWriter(file, table, problem.policy)
    for at in range(6):
        seen = problem.observation._replace(kv=KVState(int(rng.integers(0, 12)), 256), threshold_blocks=6)
        if at % 3 == 2:
            plan = plan_raise(table, seen, problem.policy, 2000)
            writer.raised(table, seen, 2000, plan)
        else:
            queue, plan = plan_step(table, seen, problem.policy, queue)
            writer.lowered(table, seen, plan)
        table = carried_out(table, plan)
    return file.getvalue().splitlines()


@settings(max_examples=30)
@given(problems, st.integers(0, 100))
def test_a_trace_replays_bit_for_bit(problem: Problem, seed: int) -> None:
    steps = list(replay(recorded(problem, seed), problem.policy))
    assert [s.step for s in steps] == list(range(6))
    assert all(s.same for s in steps)


def test_a_step_that_differs_is_seen() -> None:
    lines = recorded(parent_problem((3, 3)), 1)
    at = next(i for i, line in enumerate(lines) if i and json.loads(line)["plan"][0])
    record = json.loads(lines[at])
    record["plan"][1] *= 1 + 1e-15
    lines[at] = json.dumps(record)
    same = [s.same for s in replay(lines, parent_problem((3, 3)).policy)]
    assert same.count(False) == 1
    assert not same[at - 1]


@pytest.mark.parametrize("name", ["(2,", "f4,(2", "(2,2)i8", "i8,i8", "O", "M8[s]", "<i3", "", None, ["<i8"]])
def test_an_array_of_a_type_that_is_no_numbers_is_a_damaged_line(name: object) -> None:
    problem = parent_problem((3, 3))
    head, *steps = recorded(problem, 0)
    record = json.loads(head)
    record["layer"]["dtype"] = name
    with pytest.raises(TraceError, match="line 1 is damaged"):
        next(replay([json.dumps(record), *steps], problem.policy))


def test_another_policy_or_version_is_refused() -> None:
    problem = parent_problem((3, 3))
    lines = recorded(problem, 0)
    other = problem.policy.replaced(alpha=0.5)
    assert digest(other) != digest(problem.policy)
    with pytest.raises(ValueError, match="another policy"):
        next(replay(lines, other))
    with pytest.raises(ValueError, match="version None"):
        next(replay(lines[1:], problem.policy))
