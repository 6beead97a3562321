import numpy as np
import pytest

from pagedweight.runtime.config import RuntimeConfig


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("budget_bytes", 0),
        ("frame_bytes", -128),
        ("frame_bytes", 100),  # not a multiple of the alignment
        ("block_tokens", 0),
        ("offload_free_blocks", -1),
        ("min_dwell_steps", -1),
        ("plan_period_steps", 0),
        ("max_loading_bytes", 0),
        ("host_pinned_bytes", -1),
        ("max_requests", 0),
        ("reload_free_blocks", 8),  # equal to the offload threshold: pages would move back and forth
    ],
)
def test_impossible_settings_are_named(field, value):
    with pytest.raises(ValueError, match=field):
        RuntimeConfig(**{field: value})


@pytest.mark.parametrize(("field", "value"), [("budget_bytes", 2e9), ("block_tokens", "16"), ("max_requests", 1.5)])
def test_what_is_not_a_whole_number_is_named_at_the_door(field, value):
    with pytest.raises(TypeError, match=f"{field} is .*{type(value).__name__}; give an int"):
        RuntimeConfig(**{field: value})


def test_numpy_whole_numbers_are_whole_numbers():
    assert RuntimeConfig(budget_bytes=np.int64(4096)).budget_bytes == 4096


def test_defaults_are_legal_and_frozen():
    config = RuntimeConfig()
    with pytest.raises(AttributeError):
        config.budget_bytes = 1


def test_defaults_are_the_papers_thresholds_and_nothing_is_forecast():
    config = RuntimeConfig()
    assert (config.offload_free_blocks, config.reload_free_blocks, config.block_tokens) == (8, 16, 16)
    assert config.forecast_tokens == 0
