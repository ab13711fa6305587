"""The engine's own claims: requests in, text out, errors kept apart."""

from __future__ import annotations

import pytest
import torch

from forerun import SamplingParams
from forerun.core.draft import NO_DRAFT, Draft
from forerun.core.outputs import Origin
from forerun.engine import commit as commit_module
from forerun.errors import RequestError
from tests.contract.drafters import NGRAM, Stub
from tests.contract.test_contract import assert_nothing_is_held
from tests.engines import EOS, VOCAB_SIZE, engine_of, tiny_llm

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.mark.parametrize(
    ("prompt", "hint"),
    [
        ([], "at least one"),
        ([1, VOCAB_SIZE], f"from 0 to {VOCAB_SIZE - 1}"),
        ([-1], "got token id -1"),
        ([1] * 128, "below max_model_len"),
    ],
)
def test_an_impossible_prompt_is_refused_and_nothing_runs(prompt, hint):
    llm = tiny_llm()
    with pytest.raises(RequestError, match=hint):
        llm.generate([[1, 2], prompt], GREEDY, use_tqdm=False)
    assert_nothing_is_held(llm)


def test_a_failing_logits_processor_ends_its_request_and_nothing_else():
    def bomb(output_ids, logits):
        if len(output_ids) == 3:
            raise ValueError("boom")
        return logits

    llm = tiny_llm(NGRAM)
    params = [GREEDY, SamplingParams(temperature=0, max_tokens=12, logits_processors=[bomb]), GREEDY]
    good, bad, also_good = llm.generate([PROMPT, PROMPT, PROMPT[::-1]], params, use_tqdm=False)
    assert bad.outputs[0].finish_reason == "error"
    assert "boom" in bad.error
    assert len(bad.outputs[0].token_ids) == 3
    assert len(good.outputs[0].token_ids) == len(also_good.outputs[0].token_ids) == 12
    assert_nothing_is_held(llm)


def test_a_processor_sees_drafted_tokens_as_text():
    def never_the_same_twice(output_ids, logits):
        if output_ids:
            logits = logits.clone()
            logits[output_ids[-1]] = float("-inf")
        return logits

    sampling = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logits_processors=[never_the_same_twice])
    plain = tiny_llm().generate([PROMPT], sampling, use_tqdm=False)[0].outputs[0].token_ids
    drafted = tiny_llm(NGRAM).generate([PROMPT], sampling, use_tqdm=False)[0]
    assert drafted.outputs[0].token_ids == plain
    assert drafted.speculation.num_draft_tokens > 0
    assert all(a != b for a, b in zip(plain, plain[1:], strict=False))


def test_n_completions_differ_and_share_the_prompts_blocks():
    llm = tiny_llm()
    sampling = SamplingParams(n=4, temperature=1.0, max_tokens=8, seed=1, ignore_eos=True)
    output = llm.generate([PROMPT * 4], sampling, use_tqdm=False)[0]
    assert [c.index for c in output.outputs] == [0, 1, 2, 3]
    assert len({tuple(c.token_ids) for c in output.outputs}) == 4
    assert engine_of(llm).scheduler.num_cached_tokens >= 3 * 28  # 7 full blocks for each sibling


def test_one_of_n_with_a_seed_is_the_same_as_alone():
    first = SamplingParams(n=1, temperature=1.0, max_tokens=8, seed=1, ignore_eos=True)
    three = SamplingParams(n=3, temperature=1.0, max_tokens=8, seed=1, ignore_eos=True)
    llm = tiny_llm()
    alone, together = (llm.generate([PROMPT], s, use_tqdm=False)[0].outputs[0].token_ids for s in (first, three))
    assert alone == together


def test_logprobs_are_the_targets_whatever_was_drafted():
    sampling = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=3)
    plain = tiny_llm().generate([PROMPT], sampling, use_tqdm=False)[0].outputs[0]
    drafted = tiny_llm(NGRAM).generate([PROMPT], sampling, use_tqdm=False)[0].outputs[0]
    assert plain.token_ids == drafted.token_ids
    for a, b in zip(plain.logprobs, drafted.logprobs, strict=True):
        assert a.keys() == b.keys()
        for token_id in a:
            assert a[token_id].logprob == pytest.approx(b[token_id].logprob, abs=1e-4)
            assert a[token_id].rank == b[token_id].rank
    assert plain.cumulative_logprob == pytest.approx(drafted.cumulative_logprob, abs=1e-3)


def test_prompt_logprobs_equal_the_logprobs_of_generating_the_same_text():
    llm = tiny_llm(max_num_batched_tokens=64)
    out = llm.generate(
        [PROMPT], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0), use_tqdm=False
    )[0].outputs[0]
    scored = llm.generate([PROMPT + out.token_ids], SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)[0]
    assert scored.prompt_logprobs[0] is None
    assert len(scored.prompt_logprobs) == len(PROMPT) + 8
    tail = scored.prompt_logprobs[-8:]
    for token_id, generated, scored_row in zip(out.token_ids, out.logprobs, tail, strict=True):
        assert scored_row[token_id].logprob == pytest.approx(generated[token_id].logprob, abs=1e-4)


def test_eos_ends_the_text_unless_ignored_and_counts_from_min_tokens():
    def force_eos(output_ids, logits):
        return torch.full_like(logits, 0.0).index_fill(0, torch.tensor([EOS]), 50.0)

    llm = tiny_llm(NGRAM)
    ended = llm.generate(
        [PROMPT], SamplingParams(temperature=0, max_tokens=9, logits_processors=[force_eos]), use_tqdm=False
    )[0].outputs[0]
    assert (ended.token_ids, ended.finish_reason, ended.stop_reason) == ([EOS], "stop", None)
    late = SamplingParams(temperature=0, max_tokens=9, min_tokens=4)
    assert EOS not in llm.generate([PROMPT], late, use_tqdm=False)[0].outputs[0].token_ids[:4]


def test_origins_tell_accepted_from_the_targets_own_tokens():
    llm = tiny_llm(NGRAM)
    output = llm.generate(
        [[7, 8, 9] * 6], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True), use_tqdm=False
    )[0]
    completion = output.outputs[0]
    assert len(completion.origins) == len(completion.token_ids)
    assert completion.origins.count(Origin.ACCEPTED) == output.speculation.num_accepted_tokens


def test_cache_salt_keeps_prefixes_apart():
    llm = tiny_llm()
    for salt in ("a", "b", "a"):
        output = llm.generate({"prompt_token_ids": PROMPT * 3, "cache_salt": salt}, GREEDY, use_tqdm=False)[0]
    assert output.num_cached_tokens == 20
    assert (
        llm.generate({"prompt_token_ids": PROMPT * 3, "cache_salt": "c"}, GREEDY, use_tqdm=False)[0].num_cached_tokens
        == 0
    )


def test_a_stream_gives_the_same_tokens_as_generate_and_closing_it_frees_them():
    llm = tiny_llm(NGRAM)
    whole = llm.generate([PROMPT], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    streamed = [t for delta in llm.stream([PROMPT], GREEDY) for t in delta.token_ids]
    assert streamed == whole
    cut = llm.stream([PROMPT, PROMPT[::-1]], GREEDY)
    next(cut)
    cut.close()
    assert_nothing_is_held(llm)


def test_two_streams_can_be_read_in_turn():
    llm = tiny_llm(NGRAM)
    prompts = [PROMPT, PROMPT[::-1]]
    streams = [llm.stream([prompt], GREEDY) for prompt in prompts]
    tokens = [[], []]
    while any(deltas := [next(stream, None) for stream in streams]):
        for known, delta in zip(tokens, deltas, strict=True):
            known += delta.token_ids if delta is not None else []
    assert tokens == [o.outputs[0].token_ids for o in llm.generate(prompts, GREEDY, use_tqdm=False)]


def test_drafts_shrink_before_anyone_is_preempted():
    sampling = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    prompts = [[7, 8, 9] * 3, [5, 6, 7] * 3, [4, 6, 8] * 3, [1, 2, 3] * 3]
    room = 4 * 10  # blocks of four: just what the four sequences need in the end, and no place for drafts
    llm = tiny_llm(NGRAM, num_gpu_blocks_override=room, max_model_len=40, max_num_seqs=4, enable_prefix_caching=False)
    plain = tiny_llm().generate(prompts, sampling, use_tqdm=False)
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in plain]
    assert engine_of(llm).scheduler.num_preemptions == 0
    assert llm.stats.speculation.num_draft_tokens > 0


def test_siblings_of_a_failed_completion_say_so_in_the_stream():
    calls = []

    def bomb_once(output_ids, logits):
        calls.append(output_ids)
        if len(calls) == 4:
            raise ValueError("boom")
        return logits

    llm = tiny_llm()
    sampling = SamplingParams(n=3, max_tokens=9, seed=1, ignore_eos=True, logits_processors=[bomb_once])
    ends = {delta.index: delta.finish_reason for delta in llm.stream([PROMPT], sampling)}
    assert ends == dict.fromkeys(range(3), "error")
    assert_nothing_is_held(llm)


def test_siblings_held_back_end_with_the_first_that_fails():
    def bomb(output_ids, logits):
        raise ValueError("boom")

    llm = tiny_llm()
    (output,) = llm.generate([PROMPT], SamplingParams(n=3, logits_processors=[bomb]), use_tqdm=False)
    assert [completion.finish_reason for completion in output.outputs] == ["error"] * 3
    assert_nothing_is_held(llm)


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 4])
def test_siblings_held_back_end_with_an_abort(num_steps):
    llm = tiny_llm(max_num_batched_tokens=4, max_num_seqs=4)
    llm._engine.add_request("a", PROMPT, SamplingParams(n=3, max_tokens=9, ignore_eos=True))
    for _ in range(num_steps):
        llm._engine.step()
    output = llm._engine.abort("a")
    assert [completion.finish_reason for completion in output.outputs] == ["abort"] * 3
    assert_nothing_is_held(llm)


def test_an_engine_interrupted_after_a_commit_can_be_cleared(monkeypatch):
    """A completion may have ended in a step that never reported it."""

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    llm = tiny_llm(NGRAM)
    sampling = SamplingParams(temperature=0, max_tokens=1, logprobs=0)
    with monkeypatch.context() as patch:
        patch.setattr(commit_module, "describe_logprobs", interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([PROMPT, PROMPT[::-1]], sampling, use_tqdm=False)
    assert_nothing_is_held(llm)
    assert llm.generate([PROMPT], GREEDY, use_tqdm=False)[0].finished


def test_the_drafter_hears_of_a_sequence_when_it_first_runs_and_once_of_its_end():
    calls = []

    class Recorder(Stub):
        def start(self, sequence):
            calls.append(("start", tuple(sequence.prompt_ids)))

        def stop(self, sequence):
            calls.append(("stop", tuple(sequence.prompt_ids)))

        def draft(self, request):
            return NO_DRAFT

    llm = tiny_llm({"method": Recorder, "num_speculative_tokens": 2}, max_num_seqs=1)
    for prompt in ([1, 2], [3, 4], [5, 6]):
        llm._engine.add_request(str(prompt[0]), prompt, GREEDY)
    assert calls == []
    llm._engine.abort("3")
    while llm._engine.has_work:
        llm._engine.step()
    assert calls == [("start", (1, 2)), ("stop", (1, 2)), ("start", (5, 6)), ("stop", (5, 6))]


def test_reset_stats_counts_failed_drafts_from_zero_again():
    llm = tiny_llm({"method": Mute, "num_speculative_tokens": 2})
    llm.generate([PROMPT], GREEDY, use_tqdm=False)
    assert llm.stats.num_failed_drafts == 10
    llm.reset_stats()
    llm.generate([PROMPT], SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
    assert llm.stats.num_failed_drafts == 0  # a request for one token has no room for drafts


def test_reset_stats_counts_preemptions_and_the_prefix_cache_from_zero_again():
    llm = tiny_llm(num_gpu_blocks_override=12, max_model_len=40, max_num_seqs=6)
    names = ("vllm:num_preemptions", "vllm:prefix_cache_queries", "vllm:prefix_cache_hits")

    def counts():
        llm.generate([[*PROMPT, i, i] for i in range(6)], GREEDY, use_tqdm=False)
        values = {metric.name: metric.value for metric in llm.get_metrics() if metric.name in names}
        return [values[name] for name in names]

    counts()
    llm.reset_stats()
    assert [llm.engine.state.num_preemptions, llm.engine.state.num_queried_tokens] == [0, 0]
    again, both = counts(), counts()
    assert min(again) > 0
    assert both == [2 * count for count in again]


class Mute(Stub):
    """Always fails."""

    def propose(self, context):
        raise RuntimeError("no")


@pytest.mark.parametrize("draft", [None, Draft((1.0,)), Draft((True,)), Draft(("1",)), Draft((1, 2), (-1, 0.0)), 5])
def test_what_is_no_draft_costs_the_draft_and_not_the_text(draft):
    class Odd(Stub):
        def draft(self, request):
            return draft

    llm = tiny_llm({"method": Odd, "num_speculative_tokens": 3})
    got = llm.generate([PROMPT], GREEDY, use_tqdm=False)[0]
    assert got.outputs[0].token_ids == tiny_llm().generate([PROMPT], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    assert got.speculation.num_draft_tokens == 0
    assert llm.stats.num_failed_drafts > 0


def test_prompt_logprobs_survive_preemption_and_siblings():
    sampling = SamplingParams(temperature=0.5, seed=3, n=3, max_tokens=10, prompt_logprobs=0, ignore_eos=True)
    prompts = [PROMPT * 2, PROMPT[::-1] * 2]
    ample = tiny_llm().generate(prompts, sampling, use_tqdm=False)
    llm = tiny_llm(NGRAM, num_gpu_blocks_override=12, max_model_len=40, max_num_batched_tokens=7, max_num_seqs=6)
    tight = llm.generate(prompts, sampling, use_tqdm=False)
    assert engine_of(llm).scheduler.num_preemptions > 0
    for a, b in zip(ample, tight, strict=True):
        assert [c.token_ids for c in a.outputs] == [c.token_ids for c in b.outputs]
        for mine, theirs in zip(a.prompt_logprobs[1:], b.prompt_logprobs[1:], strict=True):
            assert {t: round(x.logprob, 3) for t, x in mine.items()} == {
                t: round(x.logprob, 3) for t, x in theirs.items()
            }


def test_a_request_for_one_token_ends_in_its_first_step_without_drafts():
    llm = tiny_llm(NGRAM)
    (output,) = llm.generate([[7, 8, 9] * 4], SamplingParams(max_tokens=1), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 1
    assert (output.speculation.num_steps, output.speculation.num_drafts) == (1, 0)


def test_a_step_without_requests_does_nothing():
    output = tiny_llm()._engine.step()
    assert (output.deltas, output.finished) == ([], [])


def test_deltas_tell_of_their_tokens_and_of_the_draft():
    llm = tiny_llm(NGRAM)
    sampling = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=1)
    whole = llm.generate([PROMPT * 3], sampling, use_tqdm=False)[0].outputs[0]
    deltas = list(llm.stream([PROMPT * 3], sampling))
    assert [row for delta in deltas for row in delta.logprobs] == whole.logprobs
    assert sum(delta.num_draft_tokens for delta in deltas) == whole.speculation.num_draft_tokens > 0
    assert sum(delta.num_accepted_tokens for delta in deltas) == whole.speculation.num_accepted_tokens
    assert all(delta.logprobs is None for delta in llm.stream([PROMPT], GREEDY))
