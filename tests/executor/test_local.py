"""What the executor in this process keeps, moves and drafts, seen at its border."""

from __future__ import annotations

import pickle
from contextlib import nullcontext

import pytest
import torch

from forerun import SamplingParams
from forerun.core.draft import NO_DRAFT, Draft
from forerun.core.step import EndedSequence, PlannedSequence, SequenceSpec, StepPlan, lay_out
from forerun.errors import ConfigError
from tests.contract.drafters import NGRAM, Stub
from tests.contract.test_contract import PROMPTS
from tests.engines import native_target, tiny_llm
from tests.native import needs_kernels

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def tree_of(answer):
    """A drafter whose trees hold `answer` among wrong branches, its nodes never side by side."""

    class Tree(Stub):
        def draft(self, request):
            right = answer[len(request.sequence.output_ids) :][:3]
            if len(right) < 3:
                return NO_DRAFT
            wrong = (right[0] + 1) % self.target.vocab_size
            return Draft((wrong, right[0], wrong, right[1], wrong, right[2]), (-1, -1, 1, 1, 3, 3))

    return {"method": Tree, "num_speculative_tokens": 6}


def test_the_accepted_path_of_a_tree_has_the_kv_that_plain_decoding_writes():
    plain, caches = tiny_llm(), {}
    answer = plain.generate([PROMPT], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    for name, llm in {"plain": tiny_llm(), "tree": tiny_llm(tree_of(answer))}.items():
        llm.engine.add_request("a", PROMPT, GREEDY)
        while llm.engine.state.num_running + llm.engine.state.num_waiting and not llm.engine.parts.scheduler.running:
            llm.engine.step()
        while len(llm.engine.parts.scheduler.running[0].output_ids) < 9:
            llm.engine.step()
        (generation,) = llm.engine.parts.scheduler.running
        slots = generation.table.slots(0, len(PROMPT) + 8)
        caches[name] = [kv.key[slots] for kv in llm.executor.cache.layers]
    for mine, plainly in zip(caches["tree"], caches["plain"], strict=True):
        torch.testing.assert_close(mine, plainly, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("ending", [{"max_tokens": 6}, {"max_tokens": 40, "stop_token_ids": True}])
def test_nothing_is_drafted_after_a_text_has_ended_by_length_or_by_a_token(ending):
    answer = tiny_llm().generate([PROMPT], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    asked = []

    class Watching(Stub):
        def draft(self, request):
            asked.append(len(request.sequence.output_ids))
            return NO_DRAFT

    if ending.get("stop_token_ids"):
        ending = ending | {"stop_token_ids": [answer[5]]}
    num_tokens = answer.index(answer[5]) + 1 if "stop_token_ids" in ending else 6
    llm = tiny_llm({"method": Watching, "num_speculative_tokens": 3})
    sampling = SamplingParams(temperature=0, ignore_eos=True, **ending)
    (output,) = llm.generate([PROMPT], sampling, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == num_tokens
    assert asked
    assert max(asked) < num_tokens


def test_a_plan_and_its_result_can_be_sent_to_another_process():
    """An engine whose every plan and result goes through a pipe's bytes writes the same texts."""
    llm = tiny_llm(NGRAM)
    expected = llm.generate(PROMPTS[:6], GREEDY, use_tqdm=False)
    execute = llm.executor.execute
    num_bytes = []

    def through_bytes(plan):
        sent = pickle.dumps(plan)
        received = pickle.dumps(execute(pickle.loads(sent)))
        num_bytes.append(len(sent) + len(received))
        return pickle.loads(received)

    llm.executor.execute = through_bytes
    outputs = llm.generate(PROMPTS[:6], GREEDY, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in expected]
    assert outputs[0].speculation.num_steps > 0
    assert num_bytes


def test_a_sequence_may_be_met_in_a_plan_without_having_been_prepared():
    """As in a process that only reads plans."""
    executor = tiny_llm().executor
    spec = SequenceSpec(seq_id=7, prompt_ids=PROMPT, sampling=GREEDY, seed=0, max_length=20)
    planned = PlannedSequence(
        seq_id=7, start=0, num_tail=8, reaches_end=True, end=8, blocks=torch.arange(2, dtype=torch.int32).numpy()
    )
    rows = lay_out([planned], [PROMPT], [NO_DRAFT], block_size=4)
    result = executor.execute(StepPlan(sequences=[planned], rows=rows, block_size=4, new=[spec])).result()
    expected = tiny_llm().generate([PROMPT], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    assert result.sequences[0].token_ids == expected[:1]
    executor.release([EndedSequence(seq_id=7, num_output_tokens=1)])
    assert not executor._states


def test_what_was_prepared_and_never_ran_is_forgotten():
    llm = tiny_llm()
    with pytest.raises(Exception, match="got token id"):
        llm.generate([PROMPT, [1000]], SamplingParams(n=3), use_tqdm=False)
    assert not llm.executor._states


def asked_candidates(llm):
    """The numbers of candidates that passes ask for and get."""
    asked, forward = set(), llm.executor.model.forward

    def watching(batch, attend):
        result = forward(batch, attend)
        found = None if result.candidates is None else result.candidates.token_ids.shape[1]
        asked.add((batch.num_candidates, found))
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm.executor.model, "forward", watching)
        llm.generate([PROMPT], GREEDY, use_tqdm=False)
    return asked


class Learner(Stub):
    num_candidates = 5

    def draft(self, _request):
        return NO_DRAFT

    def learn(self, rows):
        """Nothing."""


def test_a_pass_finds_as_many_candidates_as_the_drafter_learns_from():
    assert asked_candidates(tiny_llm({"method": Learner, "num_speculative_tokens": 2})) == {(5, 5)}
    assert asked_candidates(tiny_llm(NGRAM)) == {(0, None)}


@needs_kernels
def test_on_the_kernels_greedy_decoding_reads_the_first_candidate():
    assert asked_candidates(tiny_llm(target=native_target())) == {(1, 1)}


def test_a_drafter_that_wants_more_candidates_than_a_pass_finds_is_refused():
    greedy = type("Greedy", (Learner,), {"num_candidates": 17})
    with pytest.raises(ConfigError, match="drafter Greedy: num_candidates is 17; may be from 0 to 16"):
        tiny_llm({"method": greedy, "num_speculative_tokens": 2})


def test_steps_inside_a_block_set_torch_up_once_and_write_the_same_text(monkeypatch):
    entered = []

    class Counting:
        def __enter__(self):
            entered.append(torch.is_inference_mode_enabled())

        def __exit__(self, *_error):
            pass

    llm = tiny_llm()
    monkeypatch.setattr(llm.executor, "_torch_threads", Counting())
    texts = {}
    for name in ("alone", "together"):
        llm.engine.add_request(name, PROMPT, GREEDY)
        entered.clear()
        with llm.engine.stepping() if name == "together" else nullcontext():
            while llm.engine.has_work:
                for output in llm.engine.step().finished:
                    texts[name] = output.outputs[0].token_ids
        assert entered == [True] * (len(texts[name]) if name == "alone" else 1)
    assert texts["alone"] == texts["together"]
    assert not torch.is_inference_mode_enabled()


def test_a_step_without_memory_ends_its_request_and_no_others(monkeypatch):
    llm = tiny_llm(max_num_seqs=1)
    forward, errors = llm.executor.forward, [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")]

    def failing_once(batch, attend):
        if errors:
            raise errors.pop()
        return forward(batch, attend)

    monkeypatch.setattr(llm.executor, "forward", failing_once)
    failed, answered = llm.generate([PROMPT, PROMPT], GREEDY, use_tqdm=False)
    assert "memory" in failed.error
    assert (
        answered.outputs[0].token_ids == tiny_llm().generate([PROMPT], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    )
