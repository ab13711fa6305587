"""A target in three processes gives the bits of one; a process that dies fails requests, and nothing of the group stays."""

from __future__ import annotations

import gc
import os
import re
import signal
import threading
import time

import pytest

from forerun import SamplingParams
from forerun.build import load_target
from forerun.config.settings import EngineSettings
from forerun.engine.kv_transfer import export_kv
from forerun.errors import ConfigError, WorkerError
from forerun.executor.tensor_parallel import target as sharded
from tests.contract.drafters import CASES
from tests.contract.test_bit_identical import run
from tests.contract.test_contract import assert_nothing_is_held
from tests.engines import tiny_llm
from tests.native import needs_kernels, threads
from tests.tensor_parallel import CPU, cores, save_model, target_of, worker_ids
from tests.tiny_gguf import save_tiny_gguf
from tests.tiny_models import save_tiny_model

pytestmark = [
    needs_kernels,
    pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="only Linux shares memory so"),
]
COUNT = 24
LONG = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
NOTICED_S = 2.0


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """Gemma 2: norms on both sides, windows, soft caps, a tied and scaled embedding; its three KV heads lie on three ranks."""
    return save_model(tmp_path_factory.mktemp("model"), "Gemma2ForCausalLM")


@pytest.fixture(scope="module")
def group(path):
    """The model in three processes, and the ids of those beside this one."""
    before = set(worker_ids())
    return target_of(path, 3), sorted(set(worker_ids()) - before)


@pytest.fixture(scope="module")
def three_ranks(group):
    """The model in three processes."""
    return group[0]


@pytest.fixture(scope="module")
def plainly(path):
    """What each request gets from one process that drafts nothing."""
    return run(tiny_llm(target=target_of(path, 1)), COUNT)


def with_logits_of(target, prompts):
    """All logprobs of some prompts' tokens and of what follows, which show any bit of the logits."""
    sampling = SamplingParams(temperature=0, max_tokens=8, logprobs=264, prompt_logprobs=264, ignore_eos=True)
    outputs = tiny_llm(target=target).generate(prompts, sampling, use_tqdm=False)
    return [(output.outputs[0].logprobs, output.prompt_logprobs) for output in outputs]


def test_the_logits_of_three_processes_are_those_of_one(path, three_ranks):
    prompts = [[7, 8, 9], list(range(20, 80)), [5] * 17]
    assert with_logits_of(three_ranks, prompts) == with_logits_of(target_of(path, 1), prompts)


@pytest.mark.parametrize(
    ("quantized", "row_bits"),
    [
        (False, 0),
        (True, 8),
        (True, 16),
        *(pytest.param(*both, marks=pytest.mark.slow) for both in ((True, 0), (False, 8))),
    ],
)
def test_a_gguf_file_gives_the_logits_of_one_process(tmp_path, quantized, row_bits):
    file = tmp_path / "tiny.gguf"
    save_tiny_gguf(file, quantized=quantized)
    prompts = [[7, 8, 9], list(range(20, 60))]
    two, one = (target_of(file, count, row_bits=row_bits) for count in (2, 1))
    assert with_logits_of(two, prompts) == with_logits_of(one, prompts)


@pytest.mark.parametrize("name", ["plain", "recycle", "suffix-tree", "eagle3", "draft-model-tree", "self-exit"])
def test_text_and_logprobs_are_those_of_one_process_with_any_drafter(three_ranks, plainly, name):
    llm = tiny_llm(
        CASES[name], target=three_ranks, num_gpu_blocks_override=40, max_num_batched_tokens=48, max_num_seqs=24
    )
    assert run(llm, COUNT) == plainly
    assert_nothing_is_held(llm)


@pytest.fixture(scope="module")
def one_and_four_ranks(tmp_path_factory):
    """A model whose two key heads are shared by four ranks, of two, two, one and one query heads, and it in one process."""
    folder = tmp_path_factory.mktemp("shared heads")
    path = save_model(folder, "Olmo2ForCausalLM", num_key_value_heads=2)  # six query heads, one norm over all keys
    return target_of(path, 1), target_of(path, 4)


def test_ranks_that_share_a_key_head_give_the_logits_of_one_process(one_and_four_ranks):
    plain, four = one_and_four_ranks
    prompts = [[7, 8, 9], list(range(20, 80)), [5] * 17]
    assert with_logits_of(four, prompts) == with_logits_of(plain, prompts)


def test_another_engine_whose_kernels_take_all_cores_changes_no_logits(one_and_four_ranks):
    plain, four = one_and_four_ranks
    prompts = [list(range(20, 20 + count)) for count in (7, 13, 20, 29)]
    for prompt in prompts:
        expected = with_logits_of(plain, [prompt])
        with threads(four.kernels, 8):  # of rank 0 alone
            assert with_logits_of(four, [prompt]) == expected


def test_a_forked_child_that_ends_leaves_the_group_alone(path):
    llm = tiny_llm(target=target_of(path, 2))
    child = os.fork()
    if child == 0:
        del llm
        gc.collect()  # which ends the group where it is the parent's last engine
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert llm.generate([[5, 6]], SamplingParams(max_tokens=2), use_tqdm=False)[0].error is None


def test_kv_that_lies_in_several_processes_is_not_handed_over(three_ranks):
    llm = tiny_llm(target=three_ranks)
    llm.generate([list(range(5, 25))], SamplingParams(max_tokens=2), use_tqdm=False)
    with pytest.raises(ConfigError, match="set tensor_parallel_size to 1"):
        export_kv(llm.engine.parts, list(range(5, 25)))
    assert_nothing_is_held(llm)


def test_the_caches_of_engines_that_are_gone_are_dropped(three_ranks):
    for _ in range(3):
        llm = tiny_llm(target=three_ranks)
        llm.generate([[5, 6]], SamplingParams(max_tokens=2), use_tqdm=False)
        del llm
        gc.collect()
    waiting = len(three_ranks.make_cache._leader._dropped)
    assert waiting <= 1, "the next cache tells the other ranks which are no longer used"


def test_a_rank_that_is_killed_while_nobody_asks_is_noticed_and_the_others_end_with_it(path, capfd):
    before = set(worker_ids())
    llm = tiny_llm(target=target_of(path, 3))
    llm.engine.check_health()
    killed, other = set(worker_ids()) - before
    os.kill(killed, signal.SIGKILL)
    deadline = time.monotonic() + NOTICED_S
    failed = None
    while failed is None and time.monotonic() < deadline:
        time.sleep(0.01)
        try:
            llm.engine.check_health()
        except WorkerError as error:
            failed = str(error)
    assert re.search(rf"process {killed}\) was killed \(SIGKILL\).*load the model again", failed)
    while other in worker_ids() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert other not in worker_ids()
    assert "Fatal" not in capfd.readouterr().err, "the other ended by itself"


def test_a_rank_that_is_killed_fails_the_request_at_once_and_all_later_ones(group):
    three_ranks, workers = group
    llm = tiny_llm(target=three_ranks)
    killed = workers[0]
    threading.Timer(0.2, os.kill, (killed, signal.SIGKILL)).start()
    failed = None
    while failed is None:
        started = time.monotonic()
        try:
            llm.generate([[5, 6, 7]] * 4, LONG, use_tqdm=False)
        except WorkerError as error:
            failed = str(error)
    assert time.monotonic() - started < NOTICED_S
    assert re.search(rf"rank \d \(process {killed}\) was killed \(SIGKILL\).*load the model again", failed)
    with pytest.raises(WorkerError, match="was killed"):
        llm.generate([[5]], LONG, use_tqdm=False)
    deadline = time.monotonic() + NOTICED_S
    while any(os.path.exists(f"/proc/{pid}/cwd") for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not [pid for pid in workers if pid in worker_ids()], "the others end with it"


# --- what is refused before anything starts -------------------------------------------------------


def load(path, **settings):
    with cores(settings.pop("num_cores", 8)):
        return load_target(path, EngineSettings(model=str(path), **settings), CPU)


def test_more_processes_than_query_heads_are_refused_with_how_many_may_be(path):
    with pytest.raises(ConfigError, match=r"tensor_parallel_size: got 7; this model has 6 query heads.*may be 1 to 6"):
        load(path, tensor_parallel_size=7)


def test_more_processes_than_cores_are_refused(path):
    with pytest.raises(ConfigError, match="got 3, but there are 2 cores to compute on; lower it to 2"):
        load(path, tensor_parallel_size=3, num_cores=2)


def test_an_architecture_of_transformers_own_code_is_named(tmp_path):
    path = save_tiny_model(tmp_path, vocab_size=264)
    config = (path / "config.json").read_text().replace("LlamaForCausalLM", "GPT2LMHeadModel")
    (path / "config.json").write_text(config)
    with pytest.raises(ConfigError, match="architecture 'GPT2LMHeadModel' runs through transformers' own code"):
        sharded.checked_config(path, 2)


def test_odd_widths_are_named(tmp_path):
    path = save_tiny_model(tmp_path, vocab_size=264, intermediate_size=81)
    with pytest.raises(ConfigError, match="need even widths; got hidden_size=48, intermediate_size=81"):
        sharded.checked_config(path, 2)
