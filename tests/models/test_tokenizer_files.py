"""Our reading of tokenizer files gives what transformers' gives."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

from forerun.models.families import MODEL_TYPES, TokenizerJson
from forerun.models.tokenizer import Tokenizer, load_tokenizer
from forerun.models.tokenizer_files import (
    AS_STORED_CLASS,
    parts_of,
    read_ahead,
    read_tokenizer,
    tokenizer_without_transformers,
)
from tests.tiny_gguf import save_tiny_gguf
from tests.tiny_tokenizer import CHAT_TEMPLATE, save_tiny_tokenizer

END = {"content": "<|im_end|>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
TEXTS = st.one_of(
    st.text(), st.lists(st.sampled_from(["<|im_end|>", "he", " ", "\n", "🙂", "<|endoftext|>"])).map("".join)
)


@pytest.fixture
def folder(tmp_path):
    return save_tiny_tokenizer(tmp_path)


def change(folder, name, **changes):
    """Change a JSON file of the folder; None: take the key out."""
    file = folder / name
    content = json.loads(file.read_text()) if file.exists() else {}
    content = {key: value for key, value in {**content, **changes}.items() if value is not None}
    file.write_text(json.dumps(content))


def theirs(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    return Tokenizer(parts_of(tokenizer))


def seen(tokenizer, texts=("a<|im_end|> he\n", "")):
    """What users see of a tokenizer."""
    ids = [tokenizer.encode(text) for text in texts]
    return {
        "ids": ids,
        "texts": [tokenizer.decode(one, skip_special_tokens=skip) for one in ids for skip in (True, False)],
        "definition": json.loads(tokenizer.definition) | {"post_processor": None},
        "vocabulary": tokenizer.vocabulary(300),
        **{
            name: getattr(tokenizer, name)
            for name in ("vocab_size", "bos_token_id", "eos_token_id", "kind", "special_tokens", "special_token_ids")
        },
        "template": (tokenizer.chat_template, tokenizer.has_chat_template, tokenizer.template_variables),
    }


def outcome(load, folder):
    try:
        return seen(load(folder))
    except Exception:  # tokenizers raises no narrower type
        return None


def test_a_tokenizer_is_read_alike_and_without_transformers(folder):
    assert tokenizer_without_transformers(folder) is not None
    assert seen(load_tokenizer(folder)) == seen(theirs(folder))


@settings(deadline=None, max_examples=100)
@given(texts=st.lists(TEXTS, max_size=5))
def test_any_text_has_the_ids_and_any_ids_the_text_that_transformers_gives(pair, texts):
    ours, others = pair
    assert seen(ours, texts) == seen(others, texts)


@pytest.fixture(scope="module", params=["folder", "gguf"])
def pair(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    if request.param == "folder":
        return load_tokenizer(save_tiny_tokenizer(path)), theirs(path)
    save_tiny_gguf(path / "tiny.gguf")
    return load_tokenizer(path / "tiny.gguf"), Tokenizer(
        parts_of(AutoTokenizer.from_pretrained(path, gguf_file="tiny.gguf"))
    )


@pytest.mark.parametrize(
    "named", [None, "PreTrainedTokenizerFast", "TokenizersBackend", "LlamaTokenizer", "GPT2Tokenizer"]
)
@pytest.mark.parametrize("model_type", [None, "gpt2", *MODEL_TYPES])
def test_whichever_class_is_named_ids_and_texts_are_alike(folder, model_type, named):
    change(folder, "tokenizer_config.json", tokenizer_class=named)
    if model_type is not None:
        change(folder, "config.json", model_type=model_type, vocab_size=264)
    assert outcome(load_tokenizer, folder) == outcome(theirs, folder)


def test_the_classes_are_those_of_the_installed_transformers():
    named = {kind: set() for kind in TokenizerJson}
    for model_type, family in MODEL_TYPES.items():
        named[family.tokenizer_json].add(TOKENIZER_MAPPING_NAMES.get(model_type))
    assert named[TokenizerJson.AS_STORED_UNLESS_NAMED] == {None}
    assert named[TokenizerJson.AS_STORED] <= {
        AS_STORED_CLASS,
        "MistralCommonBackend",
    }  # the latter reads tekken.json, if mistral-common is installed


CHANGES = {
    "eos with flags": {"eos_token": {"__type": "AddedToken", **END}},
    "a special token that is new": {"pad_token": "<pad>"},
    "a special token that is a word": {"pad_token": "he"},
    "no special tokens": {"bos_token": None, "eos_token": None, "pad_token": None},
    "extra tokens": {"extra_special_tokens": ["<|im_start|>"]},
    "extra tokens under the older name": {"additional_special_tokens": ["<|im_start|>", "<new>"]},
    "named extra tokens": {"extra_special_tokens": {"image_token": "<|im_start|>"}},
    "a token of this model": {"image_token": "<|im_start|>"},
    "tokens listed": {"added_tokens_decoder": {"2": END | {"special": True}}},
    "a token listed with other flags": {"added_tokens_decoder": {"2": END | {"special": True, "lstrip": True}}},
    "a token listed that is new": {"added_tokens_decoder": {"264": END | {"content": "<new>", "special": True}}},
    "bos asked for": {"add_bos_token": True, "add_eos_token": True},
    "tidied texts": {"clean_up_tokenization_spaces": True},
    "special tokens split": {"split_special_tokens": True},
    "a prefix space": {"add_prefix_space": True},
    "one template": {"chat_template": "{{ bos_token }}{{ mood }}"},
    "templates": {"chat_template": [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]},
    "code": {"auto_map": {"AutoTokenizer": [None, "tokenization.Mine"]}},
}


@pytest.mark.parametrize("name", CHANGES)
def test_whatever_the_configuration_says_is_read_alike(tmp_path, name):
    folder = save_tiny_tokenizer(tmp_path, chat_template=None)
    change(folder, "tokenizer_config.json", **CHANGES[name])
    assert outcome(load_tokenizer, folder) == outcome(theirs, folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"eos_token": "<|endoftext|>"},
        {"eos_token": END},
        {"additional_special_tokens": ["<|im_end|>", "<|im_start|>"]},
        {"additional_special_tokens": ["<new>"]},
        {"image_token": "<|im_start|>"},
    ],
)
@pytest.mark.parametrize("listed", [None, {"2": END | {"special": True}}])
def test_a_map_of_special_tokens_is_read_alike(folder, changes, listed):
    change(folder, "tokenizer_config.json", added_tokens_decoder=listed)
    change(folder, "special_tokens_map.json", **changes)
    assert outcome(load_tokenizer, folder) == outcome(theirs, folder)


def test_added_tokens_in_a_file_of_their_own_are_read_alike(folder):
    (folder / "added_tokens.json").write_text(json.dumps({"<new>": 264}))
    assert seen(load_tokenizer(folder)) == seen(theirs(folder))


@pytest.mark.parametrize("names", [["chat_template.jinja"], ["additional_chat_templates/rag.jinja"], []])
def test_templates_in_files_come_first(tmp_path, names):
    folder = save_tiny_tokenizer(tmp_path, chat_template=None)
    change(folder, "tokenizer_config.json", chat_template="in the configuration")
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(CHAT_TEMPLATE)
    assert seen(load_tokenizer(folder)) == seen(theirs(folder))


def test_what_a_file_adds_around_texts_stays(folder):
    raw = Backend.from_file(str(folder / "tokenizer.json"))
    raw.post_processor = TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", special_tokens=[("<|im_start|>", 1), ("<|im_end|>", 2)]
    )
    raw.save(str(folder / "tokenizer.json"))
    ours = load_tokenizer(folder)
    assert ours.encode("a")[0] == 1
    assert seen(ours) == seen(theirs(folder))


def test_what_was_read_ahead_is_taken_once(folder):
    read_ahead(folder)
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "he"}')
    assert read_tokenizer(folder).special_tokens["eos_token"] == "<|im_end|>"
    assert read_tokenizer(folder).special_tokens["eos_token"] == "he"


def test_what_only_transformers_can_read_is_left_to_it(folder):
    change(folder, "tokenizer_config.json", tokenizer_class="GPT2Tokenizer", auto_map={"AutoTokenizer": ["a.B", None]})
    assert tokenizer_without_transformers(folder) is None
    read_ahead(folder)
    assert outcome(load_tokenizer, folder) == outcome(theirs, folder)
