"""What the dicts under a hybrid's "drafters" may hold, and what their errors say."""

from __future__ import annotations

import pytest

from forerun.config.speculative_config import resolve_speculative
from forerun.drafters.suffix import SuffixConfig
from forerun.errors import ConfigError, UnknownKeyError
from tests.contract.drafters import BadDrafter

SUFFIX = {"method": "suffix"}
NGRAM = {"method": "ngram", "prompt_lookup_max": 4}


def hybrid(*drafters, **settings):
    """A hybrid of these dicts."""
    return {"method": "hybrid", "num_speculative_tokens": 6, "drafters": list(drafters), **settings}


def members(config):
    """Its resolved drafters."""
    return resolve_speculative(config).drafter.drafters


def test_each_drafter_is_resolved_by_its_own_method():
    first, second = members(hybrid(SUFFIX | {"suffix-decoding-tree": True}, NGRAM))
    assert first.drafter == SuffixConfig(suffix_decoding_tree=True)
    assert second.drafter.prompt_lookup_max == 4


def test_limits_are_the_wholes_unless_given():
    first, second = members(hybrid(SUFFIX | {"min_draft_tokens": 5}, NGRAM | {"num_speculative_tokens": 4}))
    assert (first.num_speculative_tokens, first.min_draft_tokens) == (6, 5)
    assert (second.num_speculative_tokens, second.min_draft_tokens) == (4, 1)


def test_by_default_two_tokens_are_good_enough_or_all_there_may_be():
    drafters = (SUFFIX, SUFFIX | {"num_speculative_tokens": 1}, NGRAM)
    assert [member.min_draft_tokens for member in members(hybrid(*drafters))] == [2, 1, 1]


@pytest.mark.parametrize(
    "keys",
    [
        {"method": BadDrafter},
        {"method": "custom_class", "model": "tests.contract.drafters.BadDrafter"},
        {"model": "tests.contract.drafters.BadDrafter"},
    ],
)
def test_a_class_of_the_users_own_may_be_among_them(keys):
    assert members(hybrid(keys, NGRAM))[0].drafter.drafter_class is BadDrafter


def test_drafters_of_the_same_method_bear_their_place():
    assert resolve_speculative(hybrid(NGRAM, SUFFIX, NGRAM)).drafter.names == ["ngram[0]", "suffix", "ngram[2]"]


@pytest.mark.parametrize("method", ["standard", "block", "typical"])
def test_auto_among_them_knows_the_verifier_by_which_it_picks_a_heads_tokens(method):
    auto = {"method": "auto"}
    assert members(hybrid(auto, NGRAM))[0].drafter.rejection_sample_method == "matching"
    assert members(hybrid(auto, NGRAM, rejection_sample_method=method))[0].drafter.rejection_sample_method == method
    own = {"method": "self", "quantization": "int8", "draft_sample_method": "coupled"}
    with pytest.raises(ConfigError, match=r"drafters\[0\]: draft_sample_method: got 'coupled' for auto's drafter"):
        resolve_speculative(hybrid(auto | {"drafter": own}, NGRAM, rejection_sample_method=method))


def test_no_tokens_means_no_drafter():
    assert resolve_speculative(hybrid(SUFFIX, NGRAM, num_speculative_tokens=0)).describe() == "no speculation"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"method": "hybrid", "num_speculative_tokens": 6}, "drafters: got 0; must be two or more dicts"),
        (hybrid(), "drafters: got 0; must be two or more"),
        (hybrid(SUFFIX), "drafters: got 1; must be two or more"),
        (hybrid(SUFFIX, NGRAM, drafters=SUFFIX), "drafters: got {'method': 'suffix'}; must be a list"),
        (hybrid(SUFFIX, NGRAM, drafters=None), "drafters: got None; must be a list"),
        (hybrid(SUFFIX, "ngram"), "drafters[1]: got str; must be a dict"),
        (hybrid(SUFFIX, NGRAM, num_speculative_tokens=None), "method 'hybrid' has no default"),
        (hybrid(SUFFIX, NGRAM, num_speculative_tokens="six"), "num_speculative_tokens: got 'six'"),
        (hybrid(SUFFIX, NGRAM, model="x"), "method 'hybrid' uses no draft model"),
        (NGRAM | {"drafters": [SUFFIX, NGRAM], "num_speculative_tokens": 3}, "unknown key 'drafters' for method"),
        (hybrid(SUFFIX, {}), "drafters[1]: 'method' is missing"),
        (hybrid(SUFFIX, {"method": "ngramm"}), "drafters[1]: unknown method 'ngramm'; did you mean 'ngram'?"),
        (hybrid(SUFFIX, NGRAM | {"prompt_lookup": 4}), "drafters[1]: unknown key 'prompt_lookup' for method 'ngram'"),
        (hybrid(NGRAM | {"prompt_lookup_max": 0}, SUFFIX), "drafters[0]: prompt_lookup_max: got 0"),
        (hybrid(SUFFIX, {"method": "draft_model"}), "drafters[1]: method 'draft_model' needs 'model'"),
        (hybrid(SUFFIX, {"model": "no_such.Class"}), "drafters[1]: cannot import 'no_such'"),
        (hybrid(SUFFIX | {"speculative_model": "x"}, NGRAM), "drafters[0]: 'speculative_model' is no longer a key"),
        (hybrid(SUFFIX, {"method": "hybrid"}), "drafters[1]: a hybrid cannot be part of another"),
        (hybrid(SUFFIX, hybrid(SUFFIX, NGRAM)), "drafters[1]: a hybrid cannot be part of another"),
        (
            hybrid(SUFFIX | {"rejection_sample_method": "standard"}, NGRAM),
            "drafters[0]: 'rejection_sample_method' is for all drafters together; write it beside 'drafters'",
        ),
        (hybrid(SUFFIX | {"acceptance_threshold": 0.1}, NGRAM), "drafters[0]: 'acceptance_threshold' is for all"),
        (
            hybrid(SUFFIX | {"num_speculative_tokens_per_batch_size": [[1, 2, 3]]}, NGRAM),
            "drafters[0]: 'num_speculative_tokens_per_batch_size' is for all",
        ),
        (
            hybrid(SUFFIX | {"min_draft_tokens": 0}, NGRAM),
            "drafters[0]: min_draft_tokens: got 0; must be an integer from 1 to 6",
        ),
        (
            hybrid(SUFFIX | {"min_draft_tokens": 7}, NGRAM),
            "drafters[0]: min_draft_tokens: got 7; must be an integer from 1 to 6",
        ),
        (hybrid(SUFFIX | {"min_draft_tokens": 2.5}, NGRAM), "drafters[0]: min_draft_tokens: got 2.5"),
        (
            hybrid(SUFFIX | {"min_draft_tokens": 4, "num_speculative_tokens": 3}, NGRAM),
            "drafters[0]: min_draft_tokens: got 4; must be an integer from 1 to 3",
        ),
        (
            hybrid(SUFFIX, NGRAM | {"min_draft_tokens": 2}),
            "drafters[1]: min_draft_tokens: the last drafter's drafts are taken",
        ),
        (
            hybrid(SUFFIX, NGRAM | {"num_speculative_tokens": 7}),
            "drafters[1]: num_speculative_tokens: got 7; must be an integer from 1 to 6",
        ),
        (hybrid(SUFFIX, NGRAM | {"num_speculative_tokens": 0}), "drafters[1]: num_speculative_tokens: got 0"),
    ],
)
def test_a_wrong_hybrid_is_refused_with_what_to_write(given, message):
    with pytest.raises(ConfigError) as caught:
        resolve_speculative(given)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(caught.value).count("speculative_config") <= 1


def test_an_unknown_key_of_a_drafter_is_a_type_error_too():
    with pytest.raises(UnknownKeyError):
        resolve_speculative(hybrid(SUFFIX | {"nonsense": 1}, NGRAM))
