"""A policy comes back from its files as it was; what is damaged, not finite or of the wrong shape is refused."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from pagedweight.layout import Layout, MoeLayer
from pagedweight.policy import Policy

LAYOUT = Layout((MoeLayer(3, 2, 8, 4), MoeLayer(5, 3, 8, 4)), (2, 3, 4), {2: "lut16", 3: "lut16", 4: "lut16"})


def policy(seed: int = 0) -> Policy:
    rng = np.random.default_rng(seed)
    plain = Policy.from_sensitivity(LAYOUT, rng.random((LAYOUT.rows, 3)), rng.random(LAYOUT.rows))
    return plain.replaced(
        bucket_edges=[0.5],
        multipliers=[0.5, 2.0],
        floors=[[3, 4], [2, 3]],
        depth_caps=[[1, 1], [3, 2]],
        head_weights=rng.normal(size=(2, 3, 3, 3)),
        head_confidence=rng.random((2, 3, 3)),
        feature_center=rng.normal(size=(LAYOUT.rows, 3)),
        alpha=0.7,
        feature_transform="log",
    )


@given(st.integers(0, 2**32 - 1))
def test_files_hold_everything(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    folder = tmp_path_factory.mktemp("policy")
    written = policy(seed)
    written.save(folder)
    read = Policy.load(folder)
    for field in fields(Policy):
        expected, actual = getattr(written, field.name), getattr(read, field.name)
        assert np.array_equal(expected, actual), field.name
    read.check_layout(LAYOUT)


def test_who_may_read_the_folder_may_read_both_files(tmp_path: Path) -> None:
    """Another user's server reads them, as it reads pages."""
    policy().save(tmp_path)
    (tmp_path / "other").touch()
    assert {path.stat().st_mode for path in tmp_path.iterdir()} == {(tmp_path / "other").stat().st_mode}


def test_sensitivity_is_damage_at_the_mass_seen_in_calibration() -> None:
    one = policy()
    assert np.array_equal(one.sensitivity, one.s_bar * one.m_cal[:, None])


def test_neutral_defaults_change_nothing() -> None:
    plain = Policy.from_sensitivity(LAYOUT, np.ones((LAYOUT.rows, 3)), np.ones(LAYOUT.rows))
    assert plain.multipliers.tolist() == [1.0]
    assert plain.alpha == 0.0
    assert plain.floors.tolist() == [[2]]


def test_a_policy_cannot_be_written_to() -> None:
    with pytest.raises(ValueError, match="read-only"):
        policy().s_bar[0, 0] = 1.0


@pytest.mark.parametrize("value", [np.nan, np.inf, -1.0])
def test_case_23_a_score_that_is_no_score_is_named(value: float) -> None:
    s_bar = np.ones((LAYOUT.rows, 3))
    s_bar[LAYOUT.rows - 1, 1] = value
    with pytest.raises(ValueError, match=r"layers\.5\.experts\.2\.down for the transition 4 -> 3 bits"):
        Policy.from_sensitivity(LAYOUT, s_bar, np.ones(LAYOUT.rows))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"m_cal": np.ones(3)}, "s_bar has shape|blocks has shape"),
        ({"m_cal": np.full(LAYOUT.rows, -1.0)}, "m_cal holds a negative value"),
        ({"multipliers": np.ones(3)}, "bucket_edges has shape"),
        ({"bucket_edges": [1.5]}, "ascending shares"),
        ({"floors": [[2, 2], [3, 3]]}, "rise from one stage"),
        ({"floors": [[5, 5]]}, "not all among the widths"),
        ({"floors": np.empty((0, 2))}, "floors has shape"),
        ({"depth_caps": [[2, 2], [1, 1]]}, "never tighten"),
        ({"depth_caps": [[0, 1]]}, "at least 1"),
        ({"head_confidence": np.full((2, 3, 3), 2.0)}, "exceeds 1"),
        ({"feature_center": np.zeros((3, 3))}, "feature_center has shape"),
        ({"head_bias": np.full((2, 3, 3), np.nan)}, "not finite"),
        ({"alpha": float("nan")}, "alpha is nan"),
        ({"epsilon": 0.0}, "epsilon"),
        ({"rho_min": 2.0}, "rho_min"),
        ({"feature_transform": "sqrt"}, "feature_transform"),
        ({"mass_trust": 1.5}, "mass_trust is 1.5"),
    ],
)
def test_bad_fields_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        policy().replaced(**changes)


def test_another_models_policy_is_refused() -> None:
    other = Layout(LAYOUT.moe_layers[:1], LAYOUT.widths, LAYOUT.codebooks)
    with pytest.raises(ValueError, match="calibrate again"):
        policy().check_layout(other)
    with pytest.raises(ValueError, match="widths"):
        policy().check_layout(Layout(LAYOUT.moe_layers, (2, 4), LAYOUT.codebooks))


def test_case_109_fields_of_a_newer_release_warn(tmp_path: Path) -> None:
    policy().save(tmp_path)
    edit_json(tmp_path, foo=1)
    with pytest.warns(UserWarning, match="unknown fields foo"):
        Policy.load(tmp_path)


def test_a_policy_from_before_live_mass_keeps_to_its_multipliers(tmp_path: Path) -> None:
    """Its multipliers were searched with g from calibration's mass alone; both would count hotness twice. Its heads
    read features as they are."""
    policy().save(tmp_path)
    arrays = load_file(tmp_path / "policy.safetensors")
    del arrays["feature_center"]
    save_file(arrays, tmp_path / "policy.safetensors")
    document = json.loads((tmp_path / "policy.json").read_text(encoding="utf-8"))
    assert document.pop("mass_trust") == 1.0
    (tmp_path / "policy.json").write_text(json.dumps(document), encoding="utf-8")
    assert Policy.load(tmp_path).mass_trust == 0.0
    assert not Policy.load(tmp_path).feature_center.any()


def test_another_format_version_is_refused(tmp_path: Path) -> None:
    policy().save(tmp_path)
    edit_json(tmp_path, format_version=2)
    with pytest.raises(ValueError, match="format_version 2"):
        Policy.load(tmp_path)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    policy().save(tmp_path)
    arrays = load_file(tmp_path / "policy.safetensors")
    save_file({name: array for name, array in arrays.items() if name != "floors"}, tmp_path / "policy.safetensors")
    with pytest.raises(ValueError, match="lacks floors"):
        Policy.load(tmp_path)
    (tmp_path / "policy.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0cut")
    with pytest.raises(ValueError, match="is damaged"):
        Policy.load(tmp_path)
    (tmp_path / "policy.json").write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match="is not JSON"):
        Policy.load(tmp_path)


def edit_json(folder: Path, **changes: object) -> None:
    path = folder / "policy.json"
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **changes}), encoding="utf-8")
