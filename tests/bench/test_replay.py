"""Replays: an engine's steps without an engine, what drafters learn, and what cannot be replayed."""

from __future__ import annotations

import time

import numpy as np
import pytest

from forerun.bench.pass_costs import FLAT, STEEP, PassCosts
from forerun.bench.recording import RecordedText, Recording, RecordingInfo, record
from forerun.bench.replay import DRAFTING, Replayer, drafts_from_text, judge_recording
from forerun.config.settings import EngineSettings
from forerun.config.speculative_config import resolve_speculative
from forerun.core.draft import NO_DRAFT, Draft
from forerun.core.sampling_params import SamplingParams
from forerun.drafters.guard import GuardedDrafter
from forerun.engine.speculation import FixedLength
from forerun.errors import ConfigError
from forerun.llm import LLM
from tests.bench.clocks import TickingClock
from tests.contract.drafters import BadDrafter, MoodyDrafter, RandomTreeDrafter, Stub
from tests.engines import VOCAB_SIZE, tiny_target

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
FREE = PassCosts((1, 2), (1.0, 1.0))
INFO = RecordingInfo(model="tiny", dtype="float32", kernels="torch", vocab_size=VOCAB_SIZE, max_tokens=24)
PROMPTS = [[7, 8, 9] * 4, [11, 12] * 5, [20, 21, 22, 23]]


def tiny_llm(config=None):
    settings = EngineSettings(model="tiny", block_size=4, num_gpu_blocks_override=64, max_model_len=64, max_num_seqs=1)
    return LLM.from_target(tiny_target(), settings, resolve_speculative(config))


def text(answer, *, prompt=(1, 2), kind="a"):
    """A text whose candidates at place i are 10 i and 10 i + 1."""
    places = np.arange(len(answer))[:, None]
    return RecordedText(
        kind=kind,
        temperature=0.0,
        prompt_ids=[*prompt],
        answer_ids=[*answer],
        candidate_ids=(10 * places + [0, 1]).astype(np.int32),
        candidate_logprobs=np.tile(np.array([-0.1, -3.0], dtype=np.float32), (len(answer), 1)),
    )


class Scripted(Stub):
    """Drafts what it is told, draft by draft, and keeps what it is asked and shown."""

    num_candidates = 2

    def __init__(self, *drafts):
        self.drafts = [draft for draft in drafts if isinstance(draft, Draft)]  # the engine gives the target alone
        self.limits, self.learnt, self.started = [], [], set()

    def draft(self, request):
        self.limits.append((request.max_tokens, request.max_depth))
        self.min_survival = request.min_survival
        return self.drafts.pop(0) if self.drafts else NO_DRAFT

    def learn(self, rows):
        self.learnt.append(rows)


def steps(answer, *drafts, costs=FREE, num_tokens=8):
    drafter = Scripted(*drafts)
    control = FixedLength(num_speculative_tokens=num_tokens)
    return Replayer(GuardedDrafter(drafter, vocab_size=100), control, costs).replay(text(answer)), drafter


@pytest.mark.parametrize(
    "config",
    [
        NGRAM,
        {"method": "suffix", "num_speculative_tokens": 6, "suffix_decoding_tree": True},
        {"method": RandomTreeDrafter, "num_speculative_tokens": 5},
        {"method": BadDrafter, "num_speculative_tokens": 3},
    ],
    ids=["ngram", "suffix tree", "random trees", "bad"],
)
def test_a_replay_has_the_steps_and_drafts_of_the_engine(config):
    recording = record(tiny_llm(), {"loops": PROMPTS}, max_tokens=24)
    llm = tiny_llm(config)
    llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=24), use_tqdm=False)
    engine = llm.stats.speculation
    (outcome,) = judge_recording(recording, {"it": config}, FREE)
    found = outcome.speculation
    assert found.num_steps == engine.num_steps - len(PROMPTS)  # those that read the prompts
    assert (found.num_draft_tokens, found.num_accepted_tokens) == (engine.num_draft_tokens, engine.num_accepted_tokens)
    assert found.reached_per_position == engine.reached_per_position
    drafted = {name: counts.num_draft_tokens for name, counts in engine.by_drafter.items()}
    assert {name: counts.num_draft_tokens for name, counts in found.by_drafter.items()} == drafted


def test_what_stands_of_a_chain_ends_at_the_first_other_token():
    found, _ = steps([5, 6, 7, 8, 9], Draft((6, 7, 1)))
    assert found.rows == [4, 1]  # two accepted, then the text's own 8 and 9
    assert found.speculation.num_accepted_tokens == 2


def test_a_tree_stands_along_the_texts_own_path():
    found, _ = steps([5, 6, 7, 8, 9], Draft((1, 6, 1, 7), parents=(-1, -1, 1, 1)))
    assert found.rows == [5, 1]
    assert found.speculation.num_accepted_tokens == 2


def test_no_draft_is_deeper_than_what_could_be_used():
    _, drafter = steps([5, 6, 7, 8])
    assert drafter.limits == [(8, 2), (8, 1)]  # after the first token, and the second; the last is the target's own


def test_a_drafter_is_shown_the_rows_on_the_texts_path():
    _, drafter = steps([5, 6, 7, 8, 9], Draft((6, 7)))
    prompt_row, drafted = drafter.learnt
    assert (prompt_row.token_ids.tolist(), prompt_row.previous_ids.tolist()) == ([2], [1])
    assert prompt_row.candidate_ids.tolist() == [[0, 1]]
    assert prompt_row.salts == [(0, 1, None)]
    assert (drafted.token_ids.tolist(), drafted.previous_ids.tolist()) == ([5, 6, 7], [2, 5, 6])
    assert drafted.candidate_ids.tolist() == [[10, 11], [20, 21], [30, 31]]


def test_rows_of_drafted_tokens_that_did_not_stand_are_not_shown():
    _, drafter = steps([5, 6, 7, 8, 9, 10], Draft((6, 1, 1)))
    assert [rows.token_ids.tolist() for rows in drafter.learnt] == [[2], [5, 6], [7], [8]]


def test_a_first_token_of_all_has_none_before_it():
    drafter = Scripted()
    control = FixedLength(num_speculative_tokens=2)
    Replayer(GuardedDrafter(drafter, vocab_size=100), control, FREE).replay(text([5, 6], prompt=[3]))
    assert drafter.learnt[0].previous_ids.tolist() == [-1]


class Noting(FixedLength):
    """Verifies at most one node, and keeps what it is shown."""

    def __init__(self):
        super().__init__(num_speculative_tokens=4)
        object.__setattr__(self, "seen", [])

    min_survival = 0.25

    def choose(self, drafts, *, num_rows, num_sequences, num_context_tokens):
        self.seen.append((num_rows, num_sequences, num_context_tokens))
        return [min(len(draft), 1) for draft in drafts]

    def observe(self, record):
        self.seen.append(record)


def test_the_control_of_draft_lengths_decides_what_is_verified_and_sees_assumed_costs():
    control, drafter = Noting(), Scripted(Draft((6, 7)))
    found = Replayer(GuardedDrafter(drafter, vocab_size=100), control, STEEP).replay(text([5, 6, 7, 8, 9]))
    assert found.rows == [2, 1, 1]
    assert drafter.min_survival == 0.25
    chosen, record, *_, last = control.seen
    assert chosen == (1, 1, 2)  # all tokens but the last committed one are in the cache
    assert (record.num_rows, record.num_context_tokens, record.num_asked) == (2, 2, 1)
    assert record.verified == [(Draft((6,)), (0,))]
    assert (last.num_asked, last.times.draft) == (0, 0.0)
    assert record.times.forward / last.times.forward == pytest.approx(1.25)


def test_speed_ups_are_of_tokens_and_assumed_costs():
    class Right(Stub):
        def draft(self, request):
            done = len(request.sequence.output_ids)
            return Draft((5,) * min(request.max_depth, 2) if done else ())

    recording = Recording(info=INFO, texts=[text([5] * 7), text([6] * 7)])
    (outcome,) = judge_recording(recording, {"right": {"method": Right, "num_speculative_tokens": 2}}, STEEP)
    right, wrong = 2 * (1.5 + DRAFTING), 4 * 1.5 + 1.25 + 1 + 5 * DRAFTING  # passes for six tokens
    assert outcome.speed_up == pytest.approx(12 / (right + wrong))
    assert outcome.worst_speed_up == pytest.approx(6 / wrong)
    assert outcome.worst_text == 1
    assert outcome.tokens_per_step == pytest.approx(12 / 8)
    assert outcome.rows_per_step == pytest.approx((3 + 3 + 4 * 3 + 2 + 1) / 8)


def test_a_drafter_keeps_what_it_knows_within_a_kind_and_begins_the_next_anew():
    made = []

    class Counting(Scripted):
        def __init__(self, target):
            super().__init__()
            self.seen = []
            made.append(self)

        def start(self, sequence):
            self.seen.append(sequence.seq_id)

        def stop(self, sequence):
            pass

    recording = Recording(info=INFO, texts=[text([5, 6]), text([5, 7]), text([5, 6], kind="b"), text([5], kind="c")])
    outcomes = judge_recording(recording, {"it": {"method": Counting, "num_speculative_tokens": 2}}, FLAT)
    assert [drafter.seen for drafter in made] == [[0, 1], [0]]
    assert [(one.kind, one.num_texts) for one in outcomes] == [("a", 2), ("b", 1)]  # of one token nothing is drafted


def test_drafting_is_timed_and_failures_are_counted():
    recording = Recording(info=INFO, texts=[text([5] * 10)])
    configs = {"moody": {"method": MoodyDrafter, "num_speculative_tokens": 3}}
    (outcome,) = judge_recording(recording, configs, FLAT, clock=TickingClock())
    assert outcome.drafting_microseconds == pytest.approx(1e6)
    assert outcome.num_failed_drafts > 0


def test_where_the_time_of_a_pass_is_known_drafting_costs_what_it_takes():
    recording = Recording(info=INFO, texts=[text([5] * 5)])
    costs = PassCosts((1,), (1.0,), seconds=2.0)
    configs = {"idle": {"method": Scripted, "num_speculative_tokens": 3}}
    (outcome,) = judge_recording(recording, configs, costs, clock=TickingClock())
    assert outcome.speed_up == pytest.approx(4 / (4 + 3 / 2))  # of four steps the last asks for no draft


def test_a_drafter_that_goes_by_the_clock_sees_steps_that_take_what_they_cost():
    answer = list(range(1, 90))

    class Slow(Stub):
        num_asked = 0

        def draft(self, request):
            Slow.num_asked += 1
            end = time.thread_time() + 0.001  # a tenth of a pass, and nearly all the time where passes take none
            while time.thread_time() < end:
                pass
            return Draft((answer[len(request.sequence.output_ids)],))

    config = {"method": "auto", "auto_memory": 0, "drafter": {"method": Slow}}
    recording = Recording(info=INFO, texts=[text(answer)])
    judge_recording(recording, {"it": config}, PassCosts((1,), (1.0,), seconds=0.01))
    assert Slow.num_asked > 30  # in some 45 steps, which write two tokens each


@pytest.mark.parametrize(
    "config",
    [
        {"method": "self", "quantization": "int8", "num_speculative_tokens": 3},
        {"method": "hybrid", "num_speculative_tokens": 4, "drafters": [NGRAM, {"method": "self", "exit_layer": 1}]},
    ],
)
def test_a_drafter_that_computes_with_a_model_is_refused(config):
    with pytest.raises(ConfigError, match=r"^mine: .*computes with a model, whose passes are not recorded"):
        judge_recording(Recording(info=INFO, texts=[text([5, 6])]), {"mine": config}, FLAT)


class Reader(Stub):
    needs = frozenset({"last_hidden"})


class Keeper(Stub):
    kv_bytes_per_block, scratch_bytes, num_scratch_blocks = 64, 0, 0

    def use_kv(self, target_cache, *, num_blocks):
        raise AssertionError("there is no cache")


@pytest.mark.parametrize("drafter", [Reader, Keeper])
def test_a_drafter_that_reads_hidden_states_or_keeps_kv_is_refused(drafter):
    config = {"method": drafter, "num_speculative_tokens": 1}
    with pytest.raises(ConfigError, match=r"^it: the drafter reads hidden states .*, or keeps KV beside its"):
        judge_recording(Recording(info=INFO, texts=[text([5, 6])]), {"it": config}, FLAT)


def test_look_ups_need_no_model_and_heads_do():
    assert drafts_from_text(NGRAM, VOCAB_SIZE)
    assert drafts_from_text({"method": "auto"}, VOCAB_SIZE)
    head = {"method": "eagle3", "model": "no/such", "num_speculative_tokens": 2}
    assert not drafts_from_text(head, VOCAB_SIZE)


def test_a_class_that_takes_parts_of_the_model_needs_one():
    class Takes(Stub):
        def __init__(self, target):
            super().__init__(target)
            self.embed = target.loaded.model.embed

    assert not drafts_from_text({"method": Takes, "num_speculative_tokens": 2}, VOCAB_SIZE)


@pytest.mark.parametrize(
    "verifier",
    [
        {"rejection_sample_method": "standard"},
        {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.0},
    ],
)
def test_a_verifier_that_texts_are_not_replayed_by_is_refused(verifier):
    recording = Recording(info=INFO, texts=[text([5, 6])])
    with pytest.raises(
        ConfigError, match=r"^mine: rejection_sample_method: got '\w+'; what stands is replayed as matching"
    ):
        judge_recording(recording, {"mine": NGRAM | verifier}, FLAT)
    assert judge_recording(recording, {"mine": NGRAM | {"rejection_sample_method": "matching"}}, FLAT)
