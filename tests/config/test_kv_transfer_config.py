"""What a kv_transfer_config may say, which method it goes with, and what its errors say."""

from __future__ import annotations

import pytest

from forerun.config.speculative_config import resolve_speculative
from forerun.errors import ConfigError
from tests.contract.drafters import CASES, NGRAM
from tests.engines import storage

EXTRACT = CASES["extract"]


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
