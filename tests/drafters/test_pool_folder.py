"""Pools come back after a restart, are saved in time, and whatever is wrong with their file costs drafts only."""

from __future__ import annotations

import gc
import logging
import time

import numpy as np
import pytest

from forerun import LLM, SamplingParams
from forerun.drafters.pool_files import ModelIdentity, SavedPools, file_of, read_pools, write_pools
from forerun.drafters.pool_folder import SAVE_EVERY_S, PoolFolder
from forerun.errors import ConfigError
from tests.contract.test_contract import PROMPTS
from tests.engines import engine_of, tiny_llm
from tests.stand_in import save_stand_in

MODEL = ModelIdentity(fingerprint="f" * 64, name="tiny")
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


class Numbers:
    """A pool of one array for each salt."""

    def __init__(self, salts=()):
        self.salts = dict(salts)

    def to_arrays(self):
        return {salt: {"number": np.array([number], np.int32)} for salt, number in self.salts.items()}

    def from_arrays(self, saved):
        self.salts |= {salt: arrays["number"].item() for salt, arrays in saved.items()}


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


def folder_of(tmp_path, clock=time.monotonic, model=MODEL, **pools):
    folder = PoolFolder(tmp_path, pools, model, clock=clock)
    folder.load()
    return folder


def saved_numbers(tmp_path, **pools):
    one = folder_of(tmp_path, **pools)
    one.save_when_due()
    one.save()


def test_what_was_saved_is_there_after_a_restart(tmp_path):
    saved_numbers(tmp_path, numbers=Numbers({None: 3, "a": 4}))
    again = Numbers()
    folder_of(tmp_path, numbers=again)
    assert again.salts == {None: 3, "a": 4}


def test_nothing_is_saved_before_a_step(tmp_path):
    folder_of(tmp_path, numbers=Numbers({None: 3})).save()
    assert not file_of(tmp_path, MODEL).exists()


def test_pools_are_saved_when_it_is_time_and_not_before(tmp_path):
    clock = Clock()
    numbers = Numbers({None: 3})
    folder = folder_of(tmp_path, clock, numbers=numbers)
    for seconds, is_saved in ((0, False), (SAVE_EVERY_S - 1, False), (1, True)):
        clock.now += seconds
        folder.save_when_due()
        assert _appears(folder.path, within=10.0 if is_saved else 0.1) == is_saved


def _appears(path, *, within):
    end = time.monotonic() + within
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.01)
    return path.exists()


def test_pools_of_another_kind_stay_in_the_file(tmp_path):
    saved_numbers(tmp_path, first=Numbers({None: 1}))
    saved_numbers(tmp_path, second=Numbers({None: 2}))
    first, second = Numbers(), Numbers()
    folder_of(tmp_path, first=first, second=second)
    assert (first.salts, second.salts) == ({None: 1}, {None: 2})


def test_models_share_a_folder_and_nothing_else(tmp_path):
    saved_numbers(tmp_path, numbers=Numbers({None: 1}))
    other = Numbers()
    folder_of(tmp_path, model=ModelIdentity(fingerprint="e" * 64, name="tiny"), numbers=other)
    assert other.salts == {}


@pytest.mark.parametrize(
    "content", [b"nonsense", SavedPools(model=ModelIdentity(fingerprint="e" * 64, name="b"), kinds={})]
)
def test_an_unusable_file_is_named_once_and_put_aside(tmp_path, content, caplog):
    path = file_of(tmp_path, MODEL)
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        write_pools(path, content)
    before = path.read_bytes()
    with caplog.at_level(logging.WARNING):
        saved_numbers(tmp_path, numbers=Numbers({None: 7}))
    (record,) = caplog.records
    assert str(path) in record.getMessage()
    assert path.with_suffix(".unusable").read_bytes() == before
    assert read_pools(path).model == MODEL


def test_pools_are_saved_where_an_unusable_file_was_deleted_meanwhile(tmp_path):
    path = file_of(tmp_path, MODEL)
    path.write_bytes(b"nonsense")
    folder = folder_of(tmp_path, numbers=Numbers({None: 7}))
    path.unlink()
    folder.save_when_due()
    folder.save()
    assert read_pools(path).kinds["numbers"].keys() == {None}


def test_a_pool_that_does_not_fit_costs_no_other(tmp_path, caplog):
    write_pools(
        file_of(tmp_path, MODEL),
        SavedPools(model=MODEL, kinds={"bad": {None: {"other": np.ones(1)}}, "good": Numbers({None: 1}).to_arrays()}),
    )
    good, bad = Numbers(), Numbers()
    folder = folder_of(tmp_path, bad=bad)
    folder.save_when_due()
    folder.save()
    assert "its bad pool cannot be used" in caplog.text
    folder_of(tmp_path, bad=bad, good=good)
    assert (good.salts, bad.salts) == ({None: 1}, {})


def test_saving_that_fails_is_reported_once_and_disturbs_nobody(tmp_path, caplog, monkeypatch):
    folder = folder_of(tmp_path, numbers=Numbers({None: 1}))
    monkeypatch.setattr("forerun.drafters.pool_folder.write_pools", lambda *_: (_ for _ in ()).throw(OSError("full")))
    folder.save_when_due()
    folder.save()
    folder.save()
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_pool_that_cannot_be_copied_costs_no_step(tmp_path, caplog):
    clock, numbers = Clock(), Numbers()
    numbers.to_arrays = lambda: 1 / 0
    folder = folder_of(tmp_path, clock, numbers=numbers)
    clock.now += SAVE_EVERY_S
    folder.save_when_due()
    folder.save()
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_folder_that_cannot_be_made_is_the_users_mistake(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="pools_folder: cannot make"):
        PoolFolder(tmp_path / "file" / "pools", {}, MODEL)


def answered(tmp_path, config, caplog=None):
    """Acceptance of a fresh process that answers one prompt, and the text."""
    llm = tiny_llm(config, pools_folder=tmp_path)
    (output,) = llm.generate([PROMPTS[3]], GREEDY, use_tqdm=False)
    return output.speculation.num_accepted_tokens, output.outputs[0].token_ids


@pytest.mark.parametrize(
    "config",
    [
        {"method": "recycle"},
        {"method": "suffix"},
        {"method": "hybrid", "num_speculative_tokens": 5, "drafters": [{"method": "suffix"}, {"method": "recycle"}]},
    ],
    ids=lambda config: config["method"],
)
def test_a_restarted_engine_drafts_what_the_last_one_learnt(tmp_path, config):
    cold, text = answered(tmp_path, config)
    gc.collect()  # nobody uses the first engine any more: its pools are saved
    warm, same_text = answered(tmp_path, config)
    assert warm > cold
    assert same_text == text


def test_auto_keeps_all_that_its_look_ups_remember(tmp_path):
    first, again = (
        tiny_llm({"method": "auto", "auto_memory": 50.0}, pools_folder=tmp_path / name) for name in ("one", "two")
    )
    first.generate([PROMPTS[3]], GREEDY, use_tqdm=False)
    first.executor.pools.save()
    (saved,) = (tmp_path / "one").glob("*.pools")
    assert read_pools(saved).kinds.keys() == {"recycle", "answers"}
    saved.rename(again.executor.pools.path)
    again.executor.pools.load()
    lookup = engine_of(again).drafting.drafter.lookup
    assert lookup.table.of(None).twos.num_used > 10
    assert lookup.past_answers.of(None) is not None


@pytest.mark.parametrize(
    ("config", "without"),
    [
        ({"method": "auto", "auto_memory": 50.0}, {"auto_memory": 0}),
        pytest.param({"method": "recycle"}, {"recycle_max_bytes": 0}, marks=pytest.mark.slow),
        pytest.param({"method": "suffix"}, {"suffix_decoding_max_cached_requests": 0}, marks=pytest.mark.slow),
        ({"method": "suffix"}, {"suffix_decoding_max_bytes": 0}),
    ],
    ids=["auto", "recycle", "suffix without responses", "suffix without bytes"],
)
def test_an_engine_that_may_keep_nothing_leaves_the_file_alone(tmp_path, config, without, caplog):
    answered(tmp_path, config)
    gc.collect()
    (file,) = tmp_path.glob("*.pools")
    saved = file.read_bytes()
    answered(tmp_path, {**config, **without})
    gc.collect()
    assert file.read_bytes() == saved
    assert "remembers nothing of past requests; nothing is loaded or saved" in caplog.text


def test_pools_of_a_damaged_file_change_no_text(tmp_path, caplog):
    config = {"method": "recycle"}
    _, text = answered(tmp_path, config)
    gc.collect()
    (file,) = tmp_path.glob("*.pools")
    file.write_bytes(file.read_bytes()[:-100])
    assert answered(tmp_path, config)[1] == text
    assert sum(str(file) in record.getMessage() for record in caplog.records) == 1


def test_made_up_weights_leave_the_pools_of_the_model_alone(tmp_path, caplog):
    folder, pools = save_stand_in(tmp_path / "model"), tmp_path / "pools"
    own, made_up = (
        LLM(str(folder), device="cpu", speculative_config={"method": "recycle"}, pools_folder=pools, load_format=form)
        for form in ("auto", "dummy")
    )
    assert own.executor.pools is not None
    assert made_up.executor.pools is None
    assert "pools_folder: the weights are made up" in caplog.text


def test_a_drafter_without_pools_says_that_nothing_is_kept(tmp_path, caplog):
    tiny_llm({"method": "ngram", "num_speculative_tokens": 3}, pools_folder=tmp_path)
    assert "nothing is loaded or saved" in caplog.text


def test_a_folder_must_be_a_path():
    with pytest.raises(ConfigError, match="pools_folder: got 3"):
        tiny_llm(pools_folder=3)
