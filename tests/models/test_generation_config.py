"""Sampling defaults of a model's generation_config.json."""

from __future__ import annotations

import json

import pytest

from forerun.errors import ConfigError, ModelError, UnknownKeyError
from forerun.models.generation_config import SamplingDefaults

ASKED = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.05}


def folder_with(tmp_path, **content):
    tmp_path.mkdir(exist_ok=True)
    (tmp_path / "generation_config.json").write_text(json.dumps(content))
    return tmp_path


def read(source="auto", overrides=None, *, model=None):
    return SamplingDefaults.read(source, overrides, model=model)


def test_auto_takes_what_the_models_file_says_of_sampling(tmp_path):
    content = {"eos_token_id": 2, "do_sample": True, "max_length": 20, "top_a": 3, **ASKED, "max_new_tokens": 512}
    assert read(model=folder_with(tmp_path, **content)).values == {**ASKED, "max_tokens": 512}


def test_null_says_nothing(tmp_path):
    assert read(model=folder_with(tmp_path, top_k=None, num_beams=None, temperature=0)).values == {"temperature": 0}


def test_vllm_takes_nothing_of_the_file(tmp_path):
    assert read("vllm", model=folder_with(tmp_path, **ASKED)).values == {}
    assert read("vllm", {"top_k": 4}, model=tmp_path).values == {"top_k": 4}


@pytest.mark.parametrize("as_path", [str, lambda path: path])
def test_another_folder_takes_the_place_of_the_models(tmp_path, as_path):
    model = folder_with(tmp_path / "model", temperature=0.1)
    other = folder_with(tmp_path / "other", top_k=7)
    assert read(as_path(other), model=model).values == {"top_k": 7}


def test_a_model_without_the_file_has_no_defaults(tmp_path):
    for model in (None, tmp_path, tmp_path / "weights.gguf"):
        assert read(model=model).values == {}


def test_of_a_gguf_file_the_file_beside_it_does_not_count(tmp_path):
    model = folder_with(tmp_path, temperature=0.5)
    (model / "weights.gguf").write_bytes(b"")
    assert read(model=model).values == read(model=model / "weights.gguf").values == {}


def test_overrides_come_before_the_file_and_none_takes_a_value_away(tmp_path):
    overrides = {"temperature": 0.2, "top_p": None, "max_new_tokens": 9}
    found = read("auto", overrides, model=folder_with(tmp_path, temperature=0.6, top_p=0.95, top_k=20))
    assert found.values == {"temperature": 0.2, "top_k": 20, "max_tokens": 9}
    told = "top_k 20 (generation_config.json); temperature 0.2, max_tokens 9 (override_generation_config)"
    assert found.describe() == told
    assert read().describe() == ""


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ({"temperature": "0.6"}, "temperature: got '0.6'; must be from 0"),
        ({"temperature": True}, "temperature: got True; must be"),
        ({"top_k": 2.5}, "top_k: got 2.5; must be"),
        ({"top_p": 0}, "top_p: got 0; must be above 0"),
        ({"max_new_tokens": 0}, "max_new_tokens: got 0; must be an integer of 1 or more"),
    ],
)
def test_an_impossible_value_is_named_with_file_and_key(tmp_path, content, told):
    model = folder_with(tmp_path, **content)
    with pytest.raises(ConfigError) as caught:
        read(model=model)
    message = str(caught.value)
    assert message.startswith(f"{model / 'generation_config.json'}: {told}")
    assert message.endswith("; mend it, or override it by override_generation_config")
    assert read("auto", dict.fromkeys(content), model=model).values == {}
    with pytest.raises(ConfigError) as caught:
        read("vllm", content)
    assert str(caught.value).startswith(f"override_generation_config: {told}")


def test_an_override_that_is_not_applied_is_refused():
    with pytest.raises(UnknownKeyError, match="override_generation_config: unknown key 'max_tokens'; did you mean"):
        read("auto", {"max_tokens": 3})


def test_a_folder_that_is_asked_for_must_have_the_file(tmp_path):
    with pytest.raises(ModelError, match=r"no generation_config\.json"):
        read(tmp_path)
    with pytest.raises(ModelError, match="there is no such folder"):
        read(tmp_path / "absent")
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ModelError, match="not JSON"):
        read(model=tmp_path)


def test_what_is_not_applied_is_warned_of_once(tmp_path, caplog):
    model = folder_with(tmp_path, num_beams=4, typical_p=0.9, do_sample=False, top_k=3)
    read(model=model)
    (told,) = caplog.messages
    assert told.startswith(f"{model / 'generation_config.json'}: asks for do_sample=False, num_beams=4, typical_p=0.9,")
    read(model=model)
    assert len(caplog.messages) == 1


def test_what_asks_for_nothing_is_not_warned_of(tmp_path, caplog):
    nothing = {"num_beams": 1, "typical_p": 1.0, "no_repeat_ngram_size": 0, "do_sample": True, "stop_strings": None}
    read(model=folder_with(tmp_path, **nothing, bad_words_ids=[], max_length=2048, guidance_scale=1))
    assert not caplog.messages
