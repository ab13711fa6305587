"""What a speculative_config and the kv_transfer_config beside it may say, and what their errors say."""

from __future__ import annotations

import pytest

from forerun.config.drafter_config import CustomConfig
from forerun.config.speculative_config import merge_deprecated, resolve_speculative
from forerun.drafters.ngram import NgramConfig
from forerun.engine.adaptive import AdaptiveLength
from forerun.engine.speculation import FixedLength
from forerun.errors import ConfigError, UnknownKeyError
from tests.contract.drafters import CASES, BadDrafter
from tests.engines import storage

NGRAM = {"method": "ngram", "num_speculative_tokens": 5}
EXTRACT = CASES["extract"]


def test_no_config_is_a_silent_drafter_and_no_tokens():
    resolved = resolve_speculative(None)
    assert resolved.num_speculative_tokens == 0
    assert resolved.describe() == "no speculation"


def test_ngram_keys_reach_the_drafters_own_config():
    resolved = resolve_speculative(NGRAM | {"prompt_lookup_max": 4})
    assert isinstance(resolved.drafter, NgramConfig)
    assert resolved.drafter.prompt_lookup_max == 4


def test_hyphens_are_read_as_underscores():
    assert resolve_speculative({"method": "ngram", "num-speculative-tokens": 3}).num_speculative_tokens == 3


@pytest.mark.parametrize("model", ["ngram", "[ngram]"])
def test_ngram_is_recognised_by_the_model_alone(model):
    assert resolve_speculative({"model": model, "num_speculative_tokens": 3}).method == "ngram"


@pytest.mark.parametrize("path", ["tests.contract.drafters.BadDrafter"])
def test_custom_class_by_dotted_path(path):
    for given in ({"method": "custom_class", "model": path}, {"model": path}):
        resolved = resolve_speculative({**given, "num_speculative_tokens": 3})
        assert isinstance(resolved.drafter, CustomConfig)
        assert resolved.drafter.drafter_class is BadDrafter


def test_custom_class_by_the_class_itself():
    resolved = resolve_speculative({"method": BadDrafter, "num_speculative_tokens": 3})
    assert resolved.method == "BadDrafter"


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ({"method": "ngramm", "num_speculative_tokens": 5}, "did you mean 'ngram'"),
        ({"method": ["ngram"], "num_speculative_tokens": 5}, "unknown method ['ngram']"),
        ({"num_speculative_tokens": 5}, "'method' is missing"),
        ({"methods": "ngram"}, "unknown key 'methods'; did you mean 'method'"),
        (NGRAM | {"prompt_lookup_maximum": 4}, "did you mean 'prompt_lookup_max'"),
        (NGRAM | {"ngram_prompt_lookup_max": 4}, "write 'prompt_lookup_max'"),
        (NGRAM | {"speculative_model": "x"}, "write 'model'"),
        (NGRAM | {"synthetic_acceptance_rate": 0.5}, "write 'synthetic_acceptance_rates'"),
        (NGRAM | {"disable_by_batch_size": 4}, "write 'num_speculative_tokens_per_batch_size'"),
        (NGRAM | {"speculative_token_tree": "x"}, "write 'draft_tree'"),
        (NGRAM | {"adaptive_verification": True}, "write 'enable_adaptive_verification'"),
        (NGRAM | {"rejection_sample_method": "strict"}, "write 'standard'"),
        (NGRAM | {"rejection_sample_method": "probabilistic"}, "write 'standard'"),
        (NGRAM | {"rejection_sample_method": "matchin"}, "did you mean 'matching'"),
        (NGRAM | {"rejection_sample_method": ["block"]}, "rejection_sample_method: got ['block']"),
        (
            NGRAM | {"suffix_decoding_max_tree_depth": 4},
            "unknown key 'suffix_decoding_max_tree_depth' for method 'ngram'",
        ),
        (NGRAM | {"model": "some/model"}, "uses no draft model"),
        ({"method": "ngram"}, "has no default"),
        ({"method": "mtp"}, "method 'mtp' has no default"),
        ({"method": "mtp", "model": "some/model"}, "method 'mtp' uses no draft model"),
        (NGRAM | {"num_speculative_tokens": -1}, "from 0 to 128"),
        (NGRAM | {"num_speculative_tokens": 129}, "from 0 to 128"),
        (NGRAM | {"num_speculative_tokens": 2.5}, "from 0 to 128"),
        (NGRAM | {"prompt_lookup_min": 0}, "prompt_lookup_min"),
        (NGRAM | {"prompt_lookup_max": 33}, "prompt_lookup_max: got 33; must be an integer from 1 to 32"),
        (NGRAM | {"prompt_lookup_min": 5, "prompt_lookup_max": 3}, "prompt_lookup_m"),
        ({"method": "suffix", "suffix_decoding_min_token_prob": 1.5}, "suffix_decoding_min_token_prob"),
        ({"method": "suffix", "suffix_decoding_max_tree_depth": 0}, "suffix_decoding_max_tree_depth"),
        ({"method": "custom_class", "num_speculative_tokens": 2}, "dotted path"),
        ({"method": "custom_class", "model": "no_such_module.X", "num_speculative_tokens": 2}, "cannot import"),
        ({"method": None, "num_speculative_tokens": 2}, "'method' is missing; may be"),
        (
            {"method": "custom_class", "model": "tests.contract.drafters.Nope", "num_speculative_tokens": 2},
            "has no 'Nope'",
        ),
        (NGRAM | {"num_speculative_tokens_per_batch_size": []}, "non-empty list"),
        (NGRAM | {"num_speculative_tokens_per_batch_size": [[1, 2]]}, "three integers"),
        (NGRAM | {"num_speculative_tokens_per_batch_size": [[1, 8, 10], [9, 64, True]]}, "three integers"),
        (NGRAM | {"num_speculative_tokens_per_batch_size": [[2, 4, 3]]}, "start at batch size 1"),
        (NGRAM | {"num_speculative_tokens_per_batch_size": [[1, 4, 3], [4, 8, 2]]}, "overlap"),
        (NGRAM | {"num_speculative_tokens_per_batch_size": [[1, 4, -3]]}, "K >= 0"),
        (NGRAM | {"num_speculative_tokens_per_batch_size": [[4, 1, 3]]}, "first <= last"),
        (
            NGRAM | {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.5, 0.9]},
            "synthetic_acceptance_rates",
        ),
        (
            NGRAM | {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 0.5},
            "synthetic_acceptance_length",
        ),
    ],
)
def test_a_wrong_config_is_refused_with_what_to_write(given, hint):
    with pytest.raises(ConfigError) as caught:
        resolve_speculative(given).verifier.build(5)
    assert hint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_schedule_keeps_the_last_k_in_gaps_and_past_its_end():
    schedule = [[1, 2, 5], [5, 8, 2], [9, 9, 0]]
    control = resolve_speculative(NGRAM | {"num_speculative_tokens_per_batch_size": schedule}).control()
    assert [control.draft_limit(size) for size in (1, 2, 3, 5, 8, 9, 40)] == [5, 5, 5, 2, 2, 0, 0]


def test_schedule_is_capped_by_num_speculative_tokens():
    control = resolve_speculative(NGRAM | {"num_speculative_tokens_per_batch_size": [[1, 4, 50]]}).control()
    assert control.draft_limit(1) == 5


def test_older_arguments_work_and_warn_with_the_new_form():
    with pytest.warns(FutureWarning, match="speculative_config={'model': 'ngram', 'num_speculative_tokens': 5}"):
        merged = merge_deprecated(None, speculative_model="ngram", speculative_method=None, num_speculative_tokens=5)
    assert resolve_speculative(merged).method == "ngram"


@pytest.mark.parametrize("family", ["deepseek", "glm4_moe", "qwen3_next", "mimo", "ernie"])
def test_a_familys_name_for_mtp_works_and_warns(family):
    with pytest.warns(FutureWarning, match=f"method '{family}_mtp' is deprecated; write 'mtp'"):
        assert resolve_speculative({"method": f"{family}_mtp", "num_speculative_tokens": 1}).method == "mtp"


def test_older_arguments_beside_the_new_one_are_refused():
    with pytest.raises(ConfigError, match="both given"):
        merge_deprecated(NGRAM, speculative_model=None, speculative_method=None, num_speculative_tokens=5)


def test_unknown_keys_are_type_errors_too():
    with pytest.raises(UnknownKeyError) as caught:
        resolve_speculative(NGRAM | {"nonsense": 1})
    assert isinstance(caught.value, TypeError)


# --- hidden states and where they go -----------------------------------------------------------------


def layers(*layer_ids):
    return {"draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(layer_ids)}}}


def test_the_defaults_are_vllms():
    found = resolve_speculative(EXTRACT, storage() | {"kv_connector_extra_config": {}}).storage
    assert (str(found.shared_storage_path), found.num_writer_threads) == ("/tmp", 8)
    assert (found.use_synchronization_lock, found.allow_custom_save_path) == (True, False)


@pytest.mark.parametrize("given", [{}, {"num_speculative_tokens": 1}, {"num_speculative_tokens": None}])
def test_k_is_1(given):
    resolved = resolve_speculative(EXTRACT | given, storage())
    assert resolved.num_speculative_tokens == 1
    assert resolved.exported == ("hidden.3", "hidden.1")


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ({"num_speculative_tokens": 0}, "takes 1 only"),
        ({"num_speculative_tokens": 3}, "takes 1 only"),
        ({"draft_model_config": None}, "needs 'draft_model_config'"),
        ({"draft_model_config": {}}, "needs 'draft_model_config'"),
        ({"draft_model_config": {"hf_configs": {}}}, "did you mean 'hf_config'"),
        ({"draft_model_config": {"hf_config": {}}}, "needs 'draft_model_config'"),
        (
            {"draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layers": [1]}}},
            "did you mean 'eagle_aux_hidden_state_layer_ids'",
        ),
        (layers(), "must be a list of layers"),
        (layers(1, -1), "got layer -1; must be an integer of 0 or more"),
        (layers(1, "2"), "got layer '2'"),
        (layers(1, True), "got layer True"),
        (layers(2, 1, 2), "once only"),
        ({"model": "some/model"}, "uses no draft model"),
        ({"draft_model_configs": {}}, "did you mean 'draft_model_config'"),
    ],
)
def test_a_wrong_method_is_refused_with_what_to_write(given, hint):
    with pytest.raises(ConfigError) as caught:
        resolve_speculative(EXTRACT | given, storage())
    assert hint in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        (5, "must be a dict"),
        ({}, "kv_connector: got None; must be 'ExampleHiddenStatesConnector'"),
        (storage() | {"kv_connector": "LMCacheConnectorV1"}, "must be 'ExampleHiddenStatesConnector'"),
        (storage() | {"kv_role": "kv_consumer"}, "kv_role: got 'kv_consumer'; must be 'kv_producer'"),
        (storage() | {"kv_rolle": "kv_producer"}, "did you mean 'kv_role'"),
        (storage() | {"kv_connector_extra_config": []}, "kv_connector_extra_config: got []; must be a dict"),
        (storage(shared_storage_paths="x"), "did you mean 'shared_storage_path'"),
        (storage(shared_storage_path=5), "must be a folder"),
        (storage(__file__), "which is a file"),
        (storage(num_writer_threads=0), "integer of 1 or more"),
        (storage(use_synchronization_lock="no"), "must be True or False"),
        (storage(allow_custom_save_path=1), "must be True or False"),
    ],
)
def test_a_wrong_storage_is_refused_with_what_may_be(given, hint):
    with pytest.raises(ConfigError) as caught:
        resolve_speculative(EXTRACT, given)
    assert hint in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("config", [None, NGRAM])
def test_a_storage_without_the_method_is_refused(config):
    with pytest.raises(ConfigError, match="goes with speculative_config method 'extract_hidden_states' only"):
        resolve_speculative(config, storage())


def test_the_method_without_a_storage_is_refused():
    with pytest.raises(ConfigError, match=r"needs one; give \{'kv_connector'"):
        resolve_speculative(EXTRACT)


def test_the_word_auto_stands_for_its_method():
    resolved = resolve_speculative("auto")
    assert resolved == resolve_speculative({"method": "auto"})
    assert resolved.is_adaptive
    assert not resolved.needs_exact_target
    assert resolve_speculative("default").needs_exact_target


def test_other_words_are_no_configurations():
    with pytest.raises(ConfigError, match="'auto', a dict"):
        resolve_speculative("ngram")


def test_any_method_may_have_its_drafts_verified_as_far_as_pays():
    resolved = resolve_speculative(NGRAM | {"enable_adaptive_verification": True})
    assert isinstance(resolved.control(), AdaptiveLength)
    assert isinstance(resolve_speculative(NGRAM).control(), FixedLength)


@pytest.mark.parametrize(
    "wrong",
    [
        {"method": "auto", "enable_adaptive_verification": False},
        {"method": "auto", "num_speculative_tokens_per_batch_size": [[1, 2, 3]]},
        NGRAM | {"enable_adaptive_verification": 1},
        {"method": "auto", "auto_memory": -0.1},
        {"method": "auto", "auto_memory": "much"},
        {"method": "auto", "drafter": {"method": "auto"}},
        {"method": "auto", "drafter": {"method": "ngram", "num_speculative_tokens": 4}},
        {"method": "auto", "drafter": "eagle"},
    ],
)
def test_what_auto_decides_cannot_be_decided_beside_it(wrong):
    with pytest.raises(ConfigError):
        resolve_speculative(wrong)


@pytest.mark.parametrize(
    ("verifier", "greedy", "sampled"),
    [("matching", True, True), ("standard", True, False), ("block", True, False), ("typical", False, False)],
)
def test_texts_decide_what_stands_under_matching_and_where_they_are_greedy(verifier, greedy, sampled):
    resolved = resolve_speculative(NGRAM | {"rejection_sample_method": verifier})
    assert (resolved.goes_by_text(0.0), resolved.goes_by_text(1.0)) == (greedy, sampled)
    assert (resolved.goes_by_text(9e-6), resolved.goes_by_text(1e-5)) == (greedy, sampled)
