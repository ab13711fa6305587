"""Several drafters: which one drafts for which sequence, which is not asked, and the statistics of each."""

from __future__ import annotations

import pytest
import torch

from forerun import SamplingParams
from forerun.config.speculative_config import resolve_speculative
from forerun.core.draft import NO_DRAFT, Draft
from forerun.drafters.base import DraftContext, DraftRequest
from forerun.drafters.guard import GuardedDrafter
from forerun.drafters.hybrid import Hybrid, Member
from forerun.errors import ConfigError
from tests.contract.drafters import NGRAM, Stub
from tests.contract.test_contract import PROMPTS, TIGHT, assert_nothing_is_held
from tests.drafters.texts import TARGET, VOCAB_SIZE, propose, sequence
from tests.engines import VOCAB_SIZE as TINY_VOCAB_SIZE
from tests.engines import engine_of, tiny_drafter, tiny_llm

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
FREE = {key: value for key, value in NGRAM.items() if key != "num_speculative_tokens"}


class Scripted(Stub):
    """Gives each sequence the draft written down for it, and remembers whom it was asked about."""

    def __init__(self, drafts, needs=()):
        super().__init__(TARGET)
        self.drafts = drafts
        self.needs = frozenset(needs)
        self.asked = []

    def draft(self, request):
        self.asked.append(request.sequence.seq_id)
        return self.drafts.get(request.sequence.seq_id, NO_DRAFT)


class Failing(Stub):
    """Raises whenever it is asked."""

    def propose(self, context):
        raise RuntimeError("not today")


def member(name, drafter, *, max_tokens=8, min_draft_tokens=1):
    guarded = GuardedDrafter(drafter, vocab_size=VOCAB_SIZE)
    return Member(name, guarded, max_tokens=max_tokens, min_draft_tokens=min_draft_tokens)


def drafts_for(hybrid, seq_ids, *, max_tokens=8):
    """One step for these sequences."""
    sequences = [sequence([1, 2, 3], seq_id=seq_id) for seq_id in seq_ids]
    for one in sequences:
        hybrid.start(one)
    return hybrid.propose(DraftContext(requests=[DraftRequest(one, max_tokens, max_tokens) for one in sequences]))


# --- the rule -------------------------------------------------------------------------------------


def test_each_sequence_gets_the_first_draft_that_is_long_enough_and_no_later_drafter_is_asked():
    free = Scripted({1: Draft((4, 5, 6)), 2: Draft((4, 5)), 4: Draft((1, 1, 1, 1))})
    model = Scripted(dict.fromkeys((1, 2, 3, 4), Draft((9,))))
    hybrid = Hybrid([member("free", free, min_draft_tokens=3), member("model", model)])
    assert drafts_for(hybrid, [1, 2, 3, 4]) == [
        Draft((4, 5, 6), source="free"),
        Draft((9,), source="model"),
        Draft((9,), source="model"),
        Draft((1, 1, 1, 1), source="free"),
    ]
    assert free.asked == [1, 2, 3, 4]
    assert model.asked == [2, 3]


def test_where_the_last_draft_is_empty_the_first_short_one_is_taken():
    drafters = [Scripted({}), Scripted({1: Draft((4,))}), Scripted({1: Draft((5,))}), Scripted({})]
    hybrid = Hybrid([member(str(i), drafter, min_draft_tokens=3) for i, drafter in enumerate(drafters)])
    assert drafts_for(hybrid, [1, 2]) == [Draft((4,), source="1"), NO_DRAFT]


def test_a_draft_as_long_as_its_request_allows_is_good_enough():
    model = Scripted({})
    hybrid = Hybrid([member("free", Scripted({1: Draft((4, 5, 6))}), min_draft_tokens=3), member("model", model)])
    assert drafts_for(hybrid, [1], max_tokens=2) == [Draft((4, 5), source="free")]
    assert model.asked == []


def test_a_tree_is_as_long_as_it_is_deep():
    wide = Draft((4, 5, 6), (-1, -1, -1))
    hybrid = Hybrid([member("free", Scripted({1: wide}), min_draft_tokens=2), member("m", Scripted({1: Draft((9,))}))])
    assert drafts_for(hybrid, [1]) == [Draft((9,), source="m")]


def test_a_draft_with_known_odds_is_taken_or_not_whatever_was_drawn():
    drawn = Draft((4,), None, torch.full((1, VOCAB_SIZE), 1 / VOCAB_SIZE))
    model = Scripted({1: Draft((9, 9, 9)), 2: Draft((9, 9, 9))})
    hybrid = Hybrid([member("drawn", Scripted({1: drawn}), min_draft_tokens=3), member("model", model)])
    assert [draft.token_ids for draft in drafts_for(hybrid, [1, 2])] == [(4,), (9, 9, 9)]
    assert model.asked == [2]


def test_a_drafter_drafts_no_more_than_it_may():
    long = Scripted({1: Draft((4, 5, 6, 7))})
    hybrid = Hybrid([member("short", long, max_tokens=2), member("model", Scripted({}))])
    assert drafts_for(hybrid, [1]) == [Draft((4, 5), source="short")]


def test_a_draft_bears_its_members_name_whoever_drafted_its_nodes():
    mixed = Draft((4, 5), source="copy", sources=("copy", "recycle"))
    hybrid = Hybrid([member("auto", Scripted({1: mixed})), member("model", Scripted({}))])
    (draft,) = drafts_for(hybrid, [1])
    assert draft.num_drafted_by() == {"auto": 2}


def test_a_drafter_that_fails_gives_no_drafts_and_is_counted():
    hybrid = Hybrid([member("failing", Failing(TARGET)), member("model", Scripted({1: Draft((9,))}))])
    assert drafts_for(hybrid, [1, 2]) == [Draft((9,), source="model"), NO_DRAFT]
    assert GuardedDrafter(hybrid, vocab_size=VOCAB_SIZE).num_failures == 1


def test_all_drafters_hear_of_each_sequence_and_of_its_end():
    drafters = [Scripted({}), Scripted({})]
    hybrid = Hybrid([member("a", drafters[0]), member("b", drafters[1])])
    one = sequence([1, 2, 3])
    hybrid.start(one)
    propose(hybrid, one)
    assert [drafter.started for drafter in drafters] == [{1}, {1}]
    hybrid.stop(one)
    assert [drafter.started for drafter in drafters] == [set(), set()]


def test_it_needs_the_features_that_any_of_them_needs():
    hybrid = Hybrid([member("a", Scripted({}, needs=["hidden.1"])), member("b", Scripted({}, needs=["hidden.2"]))])
    assert hybrid.needs == {"hidden.1", "hidden.2"}


# --- in the engine --------------------------------------------------------------------------------


def twin(**settings):
    """A draft model with the target's own weights: always right, unless its KV is not."""
    return {"method": "draft_model", "model": tiny_drafter(TINY_VOCAB_SIZE, noise=0.0), **settings}


def hybrid_config(*drafters, num_tokens=5):
    return {"method": "hybrid", "num_speculative_tokens": num_tokens, "drafters": list(drafters)}


@pytest.mark.parametrize("settings", [{}, TIGHT, {"block_size": 3}])
def test_a_twin_behind_copies_is_right_whenever_it_is_asked_again(settings):
    llm = tiny_llm(hybrid_config(FREE | {"min_draft_tokens": 1}, twin()), **settings)
    llm.generate(PROMPTS[:60], GREEDY, use_tqdm=False)
    counts_of = llm.stats.speculation.by_drafter
    assert counts_of["ngram"].num_drafts > 50
    assert counts_of["ngram"].acceptance_rate < 1.0
    assert counts_of["draft_model"].num_drafts > 50
    assert counts_of["draft_model"].acceptance_rate == 1.0
    assert_nothing_is_held(llm)


def test_two_models_with_kv_of_their_own_do_not_disturb_each_other():
    llm = tiny_llm(hybrid_config(twin(max_model_len=40), twin(num_speculative_tokens=3)))
    llm.generate(PROMPTS[:40], GREEDY, use_tqdm=False)
    counts_of = llm.stats.speculation.by_drafter
    assert counts_of.keys() == {"draft_model[0]", "draft_model[1]"}
    assert [counts_of[name].acceptance_rate for name in sorted(counts_of)] == [1.0, 1.0]
    assert len(counts_of["draft_model[1]"].reached_per_position) == 3


def test_an_early_exit_behind_a_model_that_drafts_nothing_drafts_as_it_does_alone():
    early_exit = {"method": "self", "exit_layer": 2}
    alone = tiny_llm(early_exit | {"num_speculative_tokens": 5})
    behind = tiny_llm(hybrid_config(twin(max_model_len=1, num_speculative_tokens=1), early_exit))
    for llm in (alone, behind):
        llm.generate(PROMPTS[:12], GREEDY, use_tqdm=False)
    assert behind.stats.num_failed_drafts == 0
    assert behind.stats.speculation == alone.stats.speculation


def test_the_kv_of_all_counts_in_the_memory():
    settings = {"num_gpu_blocks_override": None, "kv_cache_memory_bytes": 1 << 20, "max_num_seqs": 256}
    early_exit = {"method": "self", "exit_layer": 1}
    configs = (
        None,
        hybrid_config(FREE, early_exit),
        hybrid_config(FREE, twin()),
        hybrid_config(twin(), early_exit, twin()),
    )
    blocks = [engine_of(tiny_llm(config, **settings)).pool.num_blocks for config in configs]
    assert blocks[1] == blocks[0]
    assert blocks[2] == pytest.approx(blocks[0] / 2, abs=2)
    assert blocks[3] == pytest.approx(blocks[0] / 3, abs=2)


def test_the_targets_cache_has_scratch_blocks_for_those_drafts_alone_that_are_written_to_it():
    early_exit = {"method": "self", "exit_layer": 1}

    def num_scratch(config):
        llm = tiny_llm(config)
        return llm.executor.cache.num_blocks - engine_of(llm).pool.num_blocks

    assert num_scratch(hybrid_config(FREE, twin())) == 0, "a model drafts in its own cache"
    exits = num_scratch(hybrid_config(FREE, early_exit))
    assert exits > 0
    assert num_scratch(hybrid_config(twin(), early_exit, twin())) == exits


def test_the_counts_of_each_add_up_in_outputs_stats_and_metrics():
    llm = tiny_llm(hybrid_config(FREE, twin()))
    outputs = llm.generate(PROMPTS[:12], GREEDY, use_tqdm=False)
    total = llm.stats.speculation
    metrics = {(metric.name, metric.labels.get("drafter")): metric for metric in llm.get_metrics()}
    for count in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
        assert sum(getattr(counts, count) for counts in total.by_drafter.values()) == getattr(total, count)
        for drafter, counts in total.by_drafter.items():
            per_request = [output.speculation.by_drafter.get(drafter) for output in outputs]
            assert sum(getattr(one, count) for one in per_request if one) == getattr(counts, count)
            name = f"forerun:spec_decode_{count}_by_drafter"
            assert metrics[name, drafter].value == getattr(counts, count) > 0


def test_a_failing_drafter_leaves_the_others_their_say():
    llm = tiny_llm(hybrid_config({"method": Failing}, twin()))
    (output,) = llm.generate(PROMPTS[:1], GREEDY, use_tqdm=False)
    assert output.speculation.acceptance_rate == 1.0
    assert llm.stats.num_failed_drafts > 0
    llm.reset_stats()
    llm.generate(PROMPTS[:1], SamplingParams(max_tokens=1), use_tqdm=False)
    assert llm.stats.num_failed_drafts == 0


@pytest.mark.parametrize("place", [0, 1])
def test_a_method_that_saves_hidden_states_is_refused_as_it_would_save_none(place):
    layers = {"hf_config": {"eagle_aux_hidden_state_layer_ids": [1]}}
    members = [FREE]
    members.insert(
        place, {"method": "extract_hidden_states", "draft_model_config": layers, "num_speculative_tokens": 1}
    )
    with pytest.raises(ConfigError, match=rf"drafters\[{place}\]: 'extract_hidden_states' drafts nothing"):
        resolve_speculative(hybrid_config(*members))


def test_an_error_while_a_drafter_is_made_says_which():
    config = hybrid_config(FREE, twin(model=str(tiny_drafter(264))))
    with pytest.raises(
        ConfigError, match=r"^speculative_config: drafters\[1\]: draft model .* has a vocabulary of 264"
    ):
        tiny_llm(config)
