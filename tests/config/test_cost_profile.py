"""Step costs that outlive the process."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

import pytest

from forerun.config.cost_profile import NOTHING_KEPT, CostProfile
from forerun.engine.costs import EXPERTS_PRIOR, MATRIX_PRIOR, PRIOR, SEQUENCE, StepCosts

HERE = {"dtype": "bfloat16", "weight_bytes": 1000, "device": "some processor", "kernels": "avx2", "threads": 2}
LEARNT = StepCosts([1.0, *PRIOR[1:]])


def profile(folder, **identity):
    return CostProfile(model="a/model name", identity=HERE | identity, folder=folder)


def test_what_one_engine_learnt_the_next_begins_with(tmp_path):
    profile(tmp_path / "costs").save(LEARNT)
    assert profile(tmp_path / "costs").load().weights == LEARNT.weights


def test_without_a_file_the_costs_are_those_of_such_kernels(tmp_path):
    assert profile(tmp_path, kernels="amx").load().weights == MATRIX_PRIOR
    profile(tmp_path).save(LEARNT)
    assert profile(tmp_path, kernels="amx").load().weights == MATRIX_PRIOR


def test_without_a_file_rows_of_a_mixture_of_experts_cost_what_they_do_there(tmp_path):
    assert profile(tmp_path, kernels="amx", experts="2 of 8").load().weights == EXPERTS_PRIOR
    assert sum(EXPERTS_PRIOR[:2]) + EXPERTS_PRIOR[SEQUENCE] == pytest.approx(1.0)


def test_a_folder_that_may_not_be_looked_into_keeps_nothing(tmp_path):
    """For root there is no such folder, but a name that is too long is refused alike."""
    file = profile(tmp_path / ("x" * 300))
    file.save(LEARNT)
    assert file.load().weights == PRIOR


def test_models_have_files_of_their_own(tmp_path):
    profile(tmp_path).save(LEARNT)
    other = CostProfile(model="another", identity=HERE, folder=tmp_path)
    assert other.load().weights == PRIOR
    assert profile(tmp_path, weight_bytes=2000).load().weights == PRIOR


@pytest.mark.parametrize("what", [{"device": "another"}, {"kernels": "torch"}, {"threads": 64}, {"dtype": "float32"}])
def test_a_profile_of_another_machine_is_noticed_and_not_used(what, tmp_path, caplog):
    profile(tmp_path).save(LEARNT)
    with caplog.at_level(logging.INFO):
        assert profile(tmp_path, **what).load().weights == PRIOR
    (name,) = what
    assert name in caplog.text


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"version": 3}', "null", "\x00\x01", "[" * 100_000])
def test_a_damaged_profile_is_named_and_costs_nothing_else(content, tmp_path, caplog):
    file = profile(tmp_path)
    file.path.write_text(content)
    assert file.load().weights == PRIOR
    assert str(file.path) in caplog.text
    file.save(LEARNT)
    assert file.load().weights == LEARNT.weights


def test_impossible_weights_are_damage(tmp_path, caplog):
    file = profile(tmp_path)
    file.save(LEARNT)
    found = json.loads(file.path.read_text())
    for weights in ([1.0, "NaN"], [10**400, *PRIOR[1:]], [1e308, *PRIOR[1:]]):
        file.path.write_text(json.dumps(found | {"weights": weights}))
        assert file.load().weights == PRIOR
        assert "damaged" in caplog.text
        caplog.clear()


def test_a_model_whose_name_is_no_text_has_a_file_too(tmp_path):
    file = CostProfile(model="a\udcff", identity=HERE, folder=tmp_path)
    file.save(LEARNT)
    assert file.load().weights == LEARNT.weights


def test_a_folder_that_cannot_be_written_stops_nobody(tmp_path):
    (tmp_path / "file").write_text("")
    file = profile(tmp_path / "file")
    file.save(LEARNT)
    assert file.load().weights == PRIOR


def test_nothing_is_kept_where_there_is_no_folder():
    NOTHING_KEPT.save(LEARNT)
    assert NOTHING_KEPT.load().weights == PRIOR


def test_what_is_not_to_be_kept_leaves_the_file_as_it_was(tmp_path):
    profile(tmp_path).save(LEARNT)
    simulated = replace(profile(tmp_path), keeps_new=False)
    simulated.save(StepCosts([0.5, *PRIOR[1:]]))
    assert simulated.load().weights == profile(tmp_path).load().weights == LEARNT.weights
