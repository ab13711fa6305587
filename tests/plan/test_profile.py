"""Profiles: what is saved comes back, and what is damaged, unfinished or of something else is refused by its name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import forerun
from forerun.errors import ConfigError
from forerun.plan.profile import PROFILE_FILE, SCHEDULE, SERVERS_KERNELS, Profile, chooses_lengths, missing_points
from tests.plan.profiles import fake_profile, random_trace

CONFIGS = fake_profile().configs


def test_a_profile_comes_back_from_its_folder(tmp_path: Path) -> None:
    saved = fake_profile(tmp_path)
    found = Profile.load(tmp_path)
    assert found == replace(saved, traces=found.traces)
    assert found.trace("suffix").acceptance() == random_trace().acceptance()
    assert found.acceptance_for("suffix", "code") == saved.acceptance["suffix/code"]


def test_a_profile_of_before_drafters_were_measured_for_memory_can_be_read(tmp_path: Path) -> None:
    fake_profile(tmp_path)
    for name in ("drafter_block_bytes", "drafter_scratch_bytes"):
        _leave_out(tmp_path, name)
        assert getattr(Profile.load(tmp_path), name) == {}


def test_a_configuration_is_found_whatever_its_draft_lengths() -> None:
    profile = fake_profile()
    assert profile.configs_like({"method": "suffix", "num-speculative-tokens": 2, SCHEDULE: [[1, 2, 1]]}) == ["suffix"]
    assert profile.configs_like({"method": "eagle3", "model": "other/head"}) == []


def test_the_engine_chooses_lengths_where_it_is_asked_to_and_with_auto() -> None:
    assert chooses_lengths({"method": "auto"})
    assert chooses_lengths({"method": "suffix", "enable_adaptive_verification": True})
    assert not chooses_lengths({"method": "suffix"})


def test_a_folder_can_be_moved(tmp_path: Path) -> None:
    fake_profile(tmp_path / "here")
    (tmp_path / "here").rename(tmp_path / "there")
    assert Profile.load(tmp_path / "there").trace("suffix").num_texts == 6


def test_the_speculation_profile_has_modelopts_keys_of_the_best_configuration(tmp_path: Path) -> None:
    fake_profile(tmp_path)
    record = json.loads((tmp_path / "speculation_profile.json").read_text())
    assert record["configuration"] == "head"
    assert record["conditional_accept_rates"] == [0.8, 0.7, 0.6]
    assert record["measurement_conditions"]["model"] == "tiny"
    assert set(record["configurations"]) == {"suffix", "head", "suffix/chat", "suffix/code"}


def _change(folder: Path, **changes: Any) -> None:
    path = folder / PROFILE_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _leave_out(folder: Path, key: str) -> None:
    path = folder / PROFILE_FILE
    record = json.loads(path.read_text())
    del record[key]
    path.write_text(json.dumps(record))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"profile": 99}, "is of version 99"),
        ({"profile": True}, "is of version True"),
        ({"num_blocks": 0}, "got num_blocks=0"),
        ({"kv_bytes_per_token": -5}, "got kv_bytes_per_token=-5; must be a whole number, at least 1"),
        ({"kv_bytes_per_token": "many"}, "got kv_bytes_per_token='many'; must be a whole number"),
        ({"kv_bytes_per_token": 1.5}, "got kv_bytes_per_token=1.5; must be a whole number"),
        ({"weight_bytes": 0}, "got weight_bytes=0; must be a whole number"),
        (
            {"weight_bytes": 10**400},
            "got weight_bytes=1000.*; must be a whole number, at least 1, at most 9007199254740992",
        ),
        ({"watts": "100"}, "got watts='100'; must be a finite number"),
        ({"gigabytes_per_second": float("nan")}, "got NaN for a number"),
        ({"drafting": {}}, "drafting or acceptance of suffix, head is missing"),
        ({"configs": {}}, "which is no profiled configuration"),
        ({"unheard_of": 1}, "unheard_of"),
        ({"step_times": {}}, "step times: the record is damaged"),
        ({"step_times": []}, r"got step_times=\[\]; must be an object"),
        ({"configs": None}, "got configs=None; must be an object"),
        ({"configs": CONFIGS | {"suffix": []}}, r"profile: configs: got suffix=\[\]; must be an object: profile again"),
        ({"configs": CONFIGS | {"suffix": {"method": 5}}}, "configs: suffix: got method=5; must be a text"),
        (
            {"configs": CONFIGS | {"suffix": {"method": "suffix", "num_speculative_tokens": None}}},
            "configs: suffix: got num_speculative_tokens=None; must be a whole number, at least 0",
        ),
        ({"configs": CONFIGS | {"suffix": {"method": "suffix", SCHEDULE: "x"}}}, f"got {SCHEDULE}='x'; must be a list"),
        (
            {"configs": CONFIGS | {"suffix": {"method": "suffix", SCHEDULE: [[1, 2]]}}},
            rf"got {SCHEDULE} with \[1, 2\]; must have a list of three whole numbers there",
        ),
        ({"kernel_settings": 5}, "got kernel_settings=5; must be an object"),
        ({"kernel_settings": None}, "got kernel_settings=None; must be an object"),
        ({"conditions": "x"}, "got conditions='x'; must be an object"),
        ({"drafting": []}, r"got drafting=\[\]; must be an object"),
        ({"acceptance": {"suffix": 5}}, "profile: acceptance: got suffix=5; must be an object"),
        ({"served_steps": None}, "got served_steps=None; must be an object"),
        ({"traces": {"suffix": 5}}, "profile: traces: got suffix=5; must be a text"),
        ({"drafter_block_bytes": {"suffix": "x"}}, "drafter_block_bytes: got suffix='x'; must be a whole number"),
        ({"drafter_scratch_bytes": {"suffix": -1}}, "drafter_scratch_bytes: got suffix=-1; must be a whole number"),
        ({"kv_cache_memory_bytes": 0.5}, "got kv_cache_memory_bytes=0.5; must be a whole number"),
        ({"model": None}, "got model=None; must be a text"),
        ({"quantization": 8}, "got quantization=8; must be a text or null"),
        ({"device": "tpu"}, "got device='tpu'; must be cpu, cuda or null"),
        ({"has_plain_steps": "yes"}, "got has_plain_steps='yes'; must be true or false"),
    ],
)
def test_a_damaged_profile_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    fake_profile(tmp_path)
    _change(tmp_path, **changes)
    with pytest.raises(ConfigError, match=message) as caught:
        Profile.load(tmp_path)
    assert str(tmp_path / PROFILE_FILE) in str(caught.value)


def test_a_file_that_is_no_object_is_refused(tmp_path: Path) -> None:
    fake_profile(tmp_path)
    (tmp_path / PROFILE_FILE).write_text("[]")
    with pytest.raises(ConfigError, match=r"got \[\]; must be an object: profile again"):
        Profile.load(tmp_path)
    (tmp_path / PROFILE_FILE).write_text("[" * 100_000)
    with pytest.raises(ConfigError, match=r"recursion.*; profile again"):
        Profile.load(tmp_path)


def test_a_profile_without_a_key_names_it(tmp_path: Path) -> None:
    fake_profile(tmp_path)
    _leave_out(tmp_path, "machine")
    with pytest.raises(ConfigError, match="machine"):
        Profile.load(tmp_path)


def test_an_unfinished_profile_says_how_to_go_on_and_an_empty_folder_how_to_begin(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="make one with forerun profile"):
        Profile.load(tmp_path)
    (tmp_path / "stages").mkdir()
    with pytest.raises(ConfigError, match="was interrupted"):
        Profile.load(tmp_path)


def test_a_missing_trace_is_named(tmp_path: Path) -> None:
    fake_profile(tmp_path)
    (tmp_path / "draft_traces" / "suffix.npz").unlink()
    with pytest.raises(ConfigError, match=r"suffix\.npz missing"):
        Profile.load(tmp_path)
    with pytest.raises(ConfigError, match="no draft trace of 'head'"):
        fake_profile().trace("head")


def test_a_profile_of_another_model_machine_or_version_is_refused() -> None:
    profile = fake_profile()
    profile.check_fits(model="tiny", machine=profile.machine, version=profile.version)
    with pytest.raises(ConfigError, match="another version"):
        profile.check_fits(version="9.9")
    with pytest.raises(ConfigError, match="another model"):
        profile.check_fits(model="other")
    with pytest.raises(ConfigError, match="another machine"):
        profile.check_fits(machine="other")


def test_a_profile_of_another_version_has_a_warning_unless_a_server_was_measured() -> None:
    profile = fake_profile()
    assert replace(profile, version=forerun.__version__).version_warning is None
    older = replace(profile, version="0.0.1")
    assert "measured with forerun 0.0.1" in older.version_warning
    assert replace(older, kernels=SERVERS_KERNELS).version_warning is None


def test_what_lies_beyond_the_measured_steps_is_said() -> None:
    step_times = fake_profile().step_times
    assert not missing_points(step_times, num_rows=200, num_sequences=32, prompt_rows=1024)
    beyond = missing_points(step_times, num_rows=2000, num_sequences=33, prompt_rows=8192)
    assert len(beyond) == 3
    most = 32 * 1024
    assert not missing_points(step_times, num_rows=1, num_sequences=1, prompt_rows=0, num_context_tokens=most)
    (context,) = missing_points(step_times, num_rows=1, num_sequences=1, prompt_rows=0, num_context_tokens=most + 1)
    assert context == "steps of 32769 tokens of context (up to 32768 were measured)"
