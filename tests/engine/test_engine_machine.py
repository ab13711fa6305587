"""Random requests, drafters, steps and aborts on a tiny pool, against each request run alone without drafts."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from forerun import SamplingParams
from forerun.engine.engine import Engine
from tests.contract.drafters import CASES, oracle
from tests.engines import VOCAB_SIZE, engine_of, tiny_llm

BLOCK = 2
TINY = {"num_gpu_blocks_override": 16, "max_model_len": 32, "block_size": BLOCK}
FEW_TOKENS = 8  # distinct prompt tokens, so that n-grams and prefixes come back


def never_twice_the_same(output_ids, logits):
    """A logits processor whose answer depends on the text before."""
    return logits.index_fill(0, logits.new_tensor(output_ids[-1:]).long(), float("-inf"))


options = st.fixed_dictionaries(
    {"seed": st.integers(0, 9), "max_tokens": st.integers(1, 16), "temperature": st.sampled_from([0.0, 0.7, 1.5])},
    optional={
        "n": st.integers(2, 3),
        "top_p": st.just(0.8),
        "top_k": st.just(5),
        "min_p": st.just(0.05),
        "presence_penalty": st.just(0.7),
        "frequency_penalty": st.just(-0.5),
        "repetition_penalty": st.just(1.3),
        "logit_bias": st.just({3: 2.0, 4: -3.0}),
        "allowed_token_ids": st.just([1, 2, 3, 5, 7, 30]),
        "min_tokens": st.just(1),
        "stop_token_ids": st.just([1, 2]),
        "ignore_eos": st.booleans(),
        "logprobs": st.integers(0, 2),
        "prompt_logprobs": st.integers(0, 2),
        "logits_processors": st.just([never_twice_the_same]),
        "speculation": st.sampled_from(["off", {"num_speculative_tokens": 2}]),
    },
)
prompts = st.lists(st.integers(0, FEW_TOKENS - 1), min_size=1, max_size=24)
configs = st.sampled_from(
    [*CASES.values(), {"method": oracle({}, wrong_every=3), "num_speculative_tokens": 9}],
)
limits = st.sampled_from([(1, 1), (1, 7), (2, 3), (4, 4), (4, 16), (8, 64)])


class EngineMachine(RuleBasedStateMachine):
    """An engine under memory pressure; whatever ends must be what the request gives alone."""

    num_preemptions = 0
    num_accepted = 0

    def __init__(self):
        super().__init__()
        self.requests = {}
        self.next_id = 0
        self.settings = {}  # of the engine that is tested
        self.target = {}  # of both engines, where it is another than usual

    @initialize(config=configs, limit=limits, caching=st.booleans(), delay=st.sampled_from([0, 1]))
    def start(self, config, limit, caching, delay):
        max_num_seqs, max_num_batched_tokens = limit
        self.llm = tiny_llm(
            config,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            enable_prefix_caching=caching,
            **TINY,
            **self.target,
            **self.settings,
        )
        self.parts = engine_of(self.llm)
        self.delay = delay
        self.engine = Engine(self.llm.engine.parts, delay=delay)
        self.alone = tiny_llm(enable_prefix_caching=False, **TINY, **self.target)

    @rule(arrivals=st.lists(st.tuples(prompts, options, st.sampled_from([None, None, "salt"])), min_size=1, max_size=4))
    def add(self, arrivals):
        for prompt, option, salt in arrivals:
            request_id = str(self.next_id)
            self.next_id += 1
            sampling = self.sampling_of(option)
            self.engine.add_request(request_id, prompt, sampling, cache_salt=salt)
            self.requests[request_id] = (prompt, sampling)

    def sampling_of(self, option):
        return SamplingParams(**option)

    @precondition(lambda self: self.requests)
    @rule(count=st.integers(1, 12))
    def step(self, count):
        for _ in range(count):
            self.finish(self.engine.step().finished)
            self.check_holdings()

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.requests)))
        self.finish([self.engine.abort(request_id)])

    def finish(self, outputs):
        for output in outputs:
            prompt, sampling = self.requests.pop(output.request_id)
            assert output.finished
            assert output.error is None
            [expected] = self.alone.generate([prompt], sampling, use_tqdm=False)
            for got, plain in zip(output.outputs, expected.outputs, strict=True):
                assert_same_completion(got, plain)
            if all(got.finish_reason != "abort" for got in output.outputs):
                assert_same_prompt_logprobs(output.prompt_logprobs, expected.prompt_logprobs)
            type(self).num_accepted += output.speculation.num_accepted_tokens

    @invariant()
    def check_holdings(self):
        if not hasattr(self, "parts"):
            return
        scheduler, pool = self.parts.scheduler, self.parts.pool
        assert not any(generation.finished for generation in scheduler.running)
        assert all(not generation.table.num_blocks for generation in scheduler.waiting)
        if self.delay:  # what has ended gives its blocks back a step late
            pool.check_integrity()
        else:
            for generation in scheduler.running:
                assert len(generation.table.block_ids) == -(-generation.table.num_computed // BLOCK)
            pool.check_integrity([generation.table.block_ids for generation in scheduler.running])
        alive = {generation.request_id for generation in (*scheduler.running, *scheduler.waiting)}
        assert alive == self.requests.keys()

    def teardown(self):
        while self.requests:
            self.step(1)
        while hasattr(self, "engine") and self.engine.has_work:
            self.engine.step()
        if hasattr(self, "parts"):
            assert self.parts.pool.num_free == self.parts.pool.num_blocks
            assert not self.engine.has_work
            assert not getattr(self.parts.drafting.drafter, "started", None)
            type(self).num_preemptions += self.parts.scheduler.num_preemptions


def assert_same_completion(got, plain):
    """`got` is what the request gives alone, or the beginning of it if it was aborted."""
    if got.finish_reason == "abort":
        assert got.token_ids == plain.token_ids[: len(got.token_ids)]
    else:
        assert (got.token_ids, got.finish_reason, got.stop_reason) == (
            plain.token_ids,
            plain.finish_reason,
            plain.stop_reason,
        )
    assert len(got.origins) == len(got.token_ids)
    assert (got.logprobs is None) == (plain.logprobs is None)
    for mine, theirs in zip(got.logprobs or (), (plain.logprobs or ())[: len(got.token_ids)], strict=True):
        assert_same_logprobs(mine, theirs)


def assert_same_prompt_logprobs(got, plain):
    assert (got is None) == (plain is None)
    for mine, theirs in zip(got or (), plain or (), strict=True):
        assert (mine is None) == (theirs is None)
        assert_same_logprobs(mine or {}, theirs or {})


def assert_same_logprobs(mine, theirs):
    assert mine.keys() == theirs.keys()
    for token_id, logprob in mine.items():
        assert logprob.logprob == pytest.approx(theirs[token_id].logprob, abs=1e-3)


def run_machine(machine, *, examples, steps):
    """Run a machine, which must have had too little memory and drafts that were right."""
    machine.num_preemptions = machine.num_accepted = 0
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert machine.num_preemptions > 0, "the memory was meant to be too small"
    assert machine.num_accepted > 0, "some drafts were meant to be right"


def test_whatever_happens_each_request_gives_what_it_gives_alone():
    assert VOCAB_SIZE > FEW_TOKENS
    run_machine(EngineMachine, examples=12, steps=15)
