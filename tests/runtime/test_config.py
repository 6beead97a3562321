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


def test_defaults_are_legal_and_frozen():
    config = RuntimeConfig()
    with pytest.raises(AttributeError):
        config.budget_bytes = 1
