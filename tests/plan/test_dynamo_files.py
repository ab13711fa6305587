"""Dynamo's files: keys and units are its own, tables hold whole steps, and what cannot be interpolated is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from forerun.errors import ConfigError
from forerun.plan.dynamo_files import (
    DECODE_KEYS,
    MOCKER_KEYS,
    PREFILL_KEYS,
    DecodePoint,
    PrefillPoint,
    read_arrays,
    write_decode,
    write_mocker,
    write_prefill,
)
from forerun.plan.step_times import DraftingCost, StepTimeModel
from tests.plan.profiles import WEIGHTS

PREFILL = [PrefillPoint(isl=isl, ttft_seconds=0.01 + isl / 5000) for isl in (100, 500, 2000)]
DECODE = [
    DecodePoint(num_sequences=n, context=c, num_draft_tokens=3, step_seconds=0.01 * n, accept_length=2.0)
    for n in (1, 4)
    for c in (128, 1024)
]


def test_files_have_dynamos_keys_and_units(tmp_path: Path) -> None:
    write_prefill(tmp_path / "p.npz", PREFILL)
    write_decode(tmp_path / "d.npz", DECODE, max_kv_tokens=32_768)
    prefill = read_arrays(tmp_path / "p.npz", PREFILL_KEYS)
    assert prefill["prefill_ttft"][0] == pytest.approx(30.0)
    assert prefill["prefill_thpt_per_gpu"][0] == pytest.approx(100 / 0.03)
    decode = read_arrays(tmp_path / "d.npz", DECODE_KEYS)
    assert decode["z_itl"][2] == pytest.approx(20.0), "milliseconds between tokens: a step of 40 ms yields two"
    assert decode["z_thpt_per_gpu"][2] == pytest.approx(4 / 0.02)
    assert decode["x_kv_usage"][1] == pytest.approx(1024 / 32_768)


def test_the_mockers_table_has_whole_steps(tmp_path: Path) -> None:
    model = StepTimeModel(WEIGHTS)
    write_mocker(
        tmp_path / "m.npz",
        model,
        PREFILL,
        num_draft_tokens=3,
        contexts=[128, 1024],
        num_sequences=[1, 4],
        max_kv_tokens=32_768,
        drafting=DraftingCost(seconds_per_step=0.001),
    )
    found = read_arrays(tmp_path / "m.npz", MOCKER_KEYS)
    assert found["decode_itl"].shape == (len(found["decode_active_kv_tokens"]), 2)
    row = found["decode_active_kv_tokens"].tolist().index(4 * 128)
    expected = model.seconds(num_rows=16, num_sequences=4, num_context_tokens=512) + 0.001
    assert found["decode_itl"][row, 0] == pytest.approx(1e3 * expected)


def test_bad_files_are_refused_with_the_array_at_fault(tmp_path: Path) -> None:
    path = tmp_path / "p.npz"
    with pytest.raises(ConfigError, match="input length"):
        write_prefill(path, PREFILL[:2])
    with pytest.raises(ConfigError, match="1 point"):
        write_decode(path, DECODE[:1], max_kv_tokens=100)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_arrays(path, PREFILL_KEYS)
    np.savez(path, prefill_isl=np.array([1.0, 2.0, 3.0]))
    with pytest.raises(ConfigError, match="lacks prefill_ttft"):
        read_arrays(path, PREFILL_KEYS)
    np.savez(path, prefill_isl=np.array([1.0, 2.0, 3.0]), prefill_ttft=np.empty(0))
    with pytest.raises(ConfigError, match="prefill_ttft has no numbers"):
        read_arrays(path, PREFILL_KEYS[:2])
    np.savez(path, prefill_isl=np.array([1.0, 2.0, 3.0]), prefill_ttft=np.array([1.0, np.nan, 3.0]))
    with pytest.raises(ConfigError, match=r"prefill_ttft\[1\] is nan"):
        read_arrays(path, PREFILL_KEYS[:2])
