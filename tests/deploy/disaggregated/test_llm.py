"""What is refused before any process starts, and a process that cannot load."""

from __future__ import annotations

import os

import pytest

from forerun.deploy.disaggregated import llm as disaggregated
from forerun.deploy.disaggregated.llm import DisaggregatedLLM, share_cores
from forerun.deploy.disaggregated.options import PrefillOptions
from forerun.deploy.disaggregated.prefill_process import PrefillProcess
from forerun.errors import ConfigError, UnknownKeyError, WorkerError
from forerun.ops.native.library import KERNELS_VARIABLE, best_kernels
from tests.deploy.disaggregated.in_one_process import needs_shared_memory
from tests.native import needs_kernels
from tests.tensor_parallel import cores, save_model


@pytest.fixture(autouse=True)
def _no_process(monkeypatch):
    def started(**_given):
        pytest.fail("a process was started")

    monkeypatch.setattr(disaggregated, "PrefillProcess", started)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"prefill_threads": 0}, "prefill_threads: got 0; must be 1 or more"),
        ({"prefill_threads": 4}, "prefill_threads: got 4; there are 4 cores .* may be 1 to 3"),
        ({"max_local_prefill_length": -1}, "max_local_prefill_length: got -1"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size: got 2; must be 1 with prefill_threads"),
    ],
)
def test_what_does_not_fit_is_refused(settings, said):
    with cores(4), pytest.raises(ConfigError, match=said):
        DisaggregatedLLM("m", **settings)


def test_a_length_for_a_process_that_is_not_asked_for_is_refused():
    with pytest.raises(ConfigError, match="got 5, and no other process reads prompts; give --prefill-threads too"):
        PrefillOptions(max_local_prefill_length=5)


def test_a_misspelt_setting_is_an_error_that_names_the_right_one():
    with cores(4), pytest.raises(UnknownKeyError, match="max_model_len"):
        DisaggregatedLLM("m", max_model_length=5)


def test_on_one_core_there_is_nothing_to_share():
    with cores(1), pytest.raises(ConfigError, match="needs the one; leave it out"):
        share_cores(1)


def test_the_processes_get_cores_of_their_own(monkeypatch):
    monkeypatch.setattr(disaggregated, "usable_cores", lambda: [0, 2, 4, 6])
    monkeypatch.setattr(disaggregated, "cpu_quota", lambda: None)
    with cores(4):
        assert share_cores(1) == ([0, 2, 4], [6])
    with cores(3):
        assert share_cores(1) == ([], []), "fewer threads than cores: the system places them"


class Unstarted:
    """Stands for a process that reads prompts, and is asked for none."""

    client = None

    def __init__(self, *, num_threads, cores):
        pass

    def load(self, model, settings):
        pass

    def wait_until_ready(self, identity):
        pass

    def close(self):
        pass


@pytest.mark.parametrize("level", ["off", pytest.param("best", marks=needs_kernels)])
def test_step_costs_are_kept_for_the_threads_that_the_other_process_leaves(level, monkeypatch, tmp_path):
    if level == "off":
        monkeypatch.setenv(KERNELS_VARIABLE, "off")
    monkeypatch.setattr(disaggregated, "PrefillProcess", Unstarted)
    kernels = best_kernels()
    num_threads = None if kernels is None else kernels.num_threads
    try:
        with cores(2):
            llm = DisaggregatedLLM(save_model(tmp_path), speculative_config="auto", dtype="float32")
            profile = llm.engine.parts.control._on_fit.__self__
            assert profile.identity["threads"] == 1
            assert profile == llm.cost_profile
    finally:
        if kernels is not None:
            kernels.use_threads(num_threads)


@needs_shared_memory
def test_a_process_that_cannot_load_says_why_and_one_that_is_closed_is_gone(tmp_path):
    process = PrefillProcess(num_threads=1, cores=[])
    with pytest.raises(ConfigError, match="as JSON, and one cannot"):
        process.load(str(tmp_path), {"speculative_config": {"method": object}})
    process.load(str(tmp_path), {})
    with pytest.raises(WorkerError, match=r"prefill process: .*config\.json"):
        process.wait_until_ready({})
    process.close()
    assert "exit status 1" in process.end_of()


@needs_shared_memory
def test_a_forked_child_that_ends_leaves_the_process_alone(tmp_path):
    process = PrefillProcess(num_threads=1, cores=[])
    child = os.fork()
    if child == 0:
        process.close()  # as the interpreter's end does
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    process.load(str(tmp_path), {})
    with pytest.raises(WorkerError, match=r"prefill process: .*config\.json"):
        process.wait_until_ready({})
    process.close()
