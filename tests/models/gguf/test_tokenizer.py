"""Tokenizers built from GGUF metadata give what transformers' give."""

import json
import math
from contextlib import nullcontext
from dataclasses import replace

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from forerun.errors import ModelError
from forerun.models.gguf import tokenizer as tokenizer_module
from forerun.models.gguf.file import open_gguf
from forerun.models.gguf.pre_tokenizers import PRE_TOKENIZERS
from forerun.models.gguf.tokenizer import SPACE, build_tokenizer
from forerun.models.tokenizer import Tokenizer, load_tokenizer
from forerun.models.tokenizer_files import parts_of
from tests.gguf_bytes import ARRAY, BOOL, F32, I32, STRING, U32, Key, gguf_bytes
from tests.tiny_gguf import PIECES, add_tiny_pieces, add_tiny_sizes, add_tiny_tokenizer

ODD = [
    "▁",
    " ",
    "  ",
    "\n",
    "\n\n1",
    "  12",
    "'ll",
    "é",
    "e\u0301",
    "日本",
    "🙂",
    "\t",
    "<s>",
    "</s>",
    "<0x41>",
    "the",
    "he",
    "ＡＢ",
    "½",
    "CamelCase",
]
TEXTS = st.one_of(st.text(), st.lists(st.sampled_from(ODD)).map("".join))


def save(path, *, architecture="llama", kind="gpt2", pre="gpt-2", more_special=(), **changes):
    """A file with a tokenizer and without tensors; `changes` are more of GGUFWriter's tokenizer keys by name."""
    writer = gguf.GGUFWriter(str(path), architecture)
    add_tiny_sizes(writer)
    if kind == "gpt2":
        add_tiny_tokenizer(writer, path.parent / "words", pre=pre)
    else:
        add_tiny_pieces(writer, kind, gemma=architecture == "gemma3", more_special=more_special)
    for name, value in changes.items():
        getattr(writer, f"add_{name}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def as_published(parts, architecture):
    """What transformers reads from a file, with what its reader leaves out of the original models' tokenizer.json.

    Llama 2's and Mistral's put a space before every text, also behind special tokens; those of Phi-3 take white space
    behind special tokens.
    """
    content = json.loads(parts.backend.to_str())
    if architecture in ("llama", "phi3"):
        spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
        content["normalizer"] = {
            "type": "Sequence",
            "normalizers": [{"type": "Prepend", "prepend": SPACE}, spaces],
        }
        content["pre_tokenizer"] = None
    for token in content["added_tokens"]:
        token["rstrip"] = architecture == "phi3" and token["content"] not in ("<unk>", "<s>", "<|endoftext|>")
    return replace(parts, backend=Backend.from_str(json.dumps(content)))


@pytest.fixture(scope="module", params=["llama", "phi3", "gemma3"])
def pair(request, tmp_path_factory):
    """Our SentencePiece tokenizer and transformers'."""
    path = save(tmp_path_factory.mktemp("gguf") / "x.gguf", architecture=request.param, kind="llama")
    theirs = parts_of(AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name))
    return load_tokenizer(path), Tokenizer(as_published(theirs, request.param))


@settings(max_examples=200)
@given(text=TEXTS)
def test_pieces_encode_and_decode_as_in_transformers(pair, text):
    ours, others = pair
    ids = ours.encode(text)
    assert ids == others.encode(text)
    assert ours.decode(ids, skip_special_tokens=False) == others.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("name", sorted(GGUF_PRE_TOKENIZER_SPLITS.keys() & PRE_TOKENIZERS.keys()))
def test_words_are_cut_as_in_transformers(name):
    split = pre_tokenizers.Split(Regex(GGUF_PRE_TOKENIZER_SPLITS[name]), "isolated")
    theirs = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    ours = PRE_TOKENIZERS[name].pre_tokenizer()

    @given(text=TEXTS)
    @settings(max_examples=60)
    def check(text):
        assert ours.pre_tokenize_str(text) == theirs.pre_tokenize_str(text)

    check()


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
@given(text=TEXTS)
@settings(max_examples=20)
def test_no_text_is_lost_whatever_the_pre_tokenizer(tmp_path_factory, name, text):
    tokenizer = tokenizer_named(tmp_path_factory, name)
    if not PRE_TOKENIZERS[name].composes:
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def tokenizer_named(tmp_path_factory, name, _kept={}):  # noqa: B006 (one for each name)
    if name not in _kept:
        _kept[name] = load_tokenizer(save(tmp_path_factory.mktemp("gguf") / "x.gguf", pre=name, add_bos_token=False))
    return _kept[name]


@pytest.mark.parametrize("pre", [None, "default"])
def test_a_file_that_does_not_say_how_texts_are_cut_is_read_as_llama_cpp_does(tmp_path, pre, caplog):
    """Punctuation first, then GPT-2's words, then numbers, three digits at a time."""
    tokenizer, _ = build_tokenizer(open_gguf(save(tmp_path / "x.gguf", pre=pre)))
    cut = tokenizer.pre_tokenizer.pre_tokenize_str("Hi  ...1234<b> c")
    assert [word for word, _ in cut] == ["Hi", "ĠĠ", "...", "123", "4", "<", "b", ">", "Ġc"]
    assert ("tokenizer.ggml.pre" in caplog.text) == (pre is None)


def test_digits_are_single_words_where_the_vocabulary_was_trained_so():
    cut = PRE_TOKENIZERS["smollm"].pre_tokenizer().pre_tokenize_str("a  12")
    assert [word for word, _ in cut] == ["a", "ĠĠ", "1", "2"]


@pytest.mark.parametrize(
    ("changes", "begins", "ends"),
    [
        ({}, False, False),
        ({"pre": "llama-bpe"}, True, False),
        ({"pre": "llama-bpe", "add_bos_token": False}, False, False),
        ({"add_bos_token": True, "add_eos_token": True}, True, True),
        ({"kind": "llama"}, True, False),
        ({"kind": "llama", "add_bos_token": False}, False, False),
    ],
)
def test_texts_begin_and_end_as_the_file_says(tmp_path, changes, begins, ends):
    tokenizer = load_tokenizer(save(tmp_path / "x.gguf", **changes))
    ids = tokenizer.encode("he")
    assert (ids[0] == tokenizer.bos_token_id, ids[-1] == tokenizer.eos_token_id) == (begins, ends)
    assert tokenizer.encode("he", add_special_tokens=False) == ids[begins : len(ids) - ends]


def test_a_text_begins_with_a_space_unless_the_file_says_no(tmp_path):
    with_space = load_tokenizer(save(tmp_path / "a.gguf", kind="llama"))
    without = load_tokenizer(save(tmp_path / "b.gguf", kind="llama", add_space_prefix=False))
    assert [with_space.token_text(i) for i in with_space.encode("the", add_special_tokens=False)] == ["the"]
    assert with_space.encode("the") != without.encode("the")
    assert without.decode(without.encode(" the"), skip_special_tokens=True) == " the"


@pytest.mark.parametrize(("architecture", "after_a_line"), [("llama", ["▁", "<0x0A>", "the"]), ("phi3", ["▁the"])])
def test_a_text_behind_a_special_token_begins_with_a_space_too(tmp_path, architecture, after_a_line):
    tokenizer = load_tokenizer(save(tmp_path / "x.gguf", architecture=architecture, kind="llama"))

    def pieces(text):
        return [tokenizer.token_text(i) for i in tokenizer.encode(text, add_special_tokens=False)]

    assert pieces("<s>the</s>the") == [*pieces("<s>"), *pieces("the"), *pieces("</s>"), *pieces("the")]
    assert tokenizer.encode("</s>\nthe", add_special_tokens=False)[1:] == [
        tokenizer.tokens[one] for one in after_a_line
    ]
    assert tokenizer.encode(" the") != tokenizer.encode("the")


@pytest.mark.parametrize("kind", [None, 1, 2, 3, 4], ids=["no-type", "normal", "unknown", "control", "user-defined"])
def test_a_word_that_ends_answers_is_found_whole_whatever_its_type(tmp_path, kind):
    types = [] if kind is None else [Key("tokenizer.ggml.token_type", ARRAY, [1, 1, kind], I32)]
    tokenizer = load_tokenizer(save_two_words(tmp_path, *types, words=["a", "b", "<|im_end|>"]))
    assert tokenizer.encode("a<|im_end|>b") == [0, 2, 1]
    assert tokenizer.decode([0, 2, 1], skip_special_tokens=True) == "ab"


def test_html_tags_of_gemma_are_text(tmp_path):
    keys = [
        Key("tokenizer.ggml.token_type", ARRAY, [1, 1, 4], I32),
        Key("tokenizer.ggml.add_space_prefix", BOOL, False),
    ]
    words = ["a", "b", "</s>"]
    for architecture, text in (("llama", "ab"), ("gemma3", "a</s>b")):
        path = save_two_words(tmp_path, *keys, architecture=architecture, kind="llama", words=words)
        tokenizer = load_tokenizer(path)
        assert tokenizer.encode("a</s>b", add_special_tokens=False) == [0, 2, 1]
        assert tokenizer.decode([0, 2, 1], skip_special_tokens=True) == text


def test_the_unknown_word_is_a_special_token(tmp_path):
    types = Key("tokenizer.ggml.token_type", ARRAY, [1, 1, 2], I32)
    tokenizer = load_tokenizer(save_two_words(tmp_path, types, words=["a", "b", "<unk>"]))
    assert tokenizer.encode("a<unk>b") == [0, 2, 1]


def test_control_and_user_defined_tokens_are_found_in_texts(tmp_path):
    tokenizer = load_tokenizer(save(tmp_path / "x.gguf", kind="llama"))
    ids = tokenizer.encode("<s>the<think></s>", add_special_tokens=False)
    assert ids[0] == tokenizer.bos_token_id
    assert ids[-2:] == [tokenizer.tokens["<think>"], tokenizer.eos_token_id]
    assert tokenizer.tokens["<think>"] not in tokenizer.special_token_ids


def test_gemmas_runs_of_spaces_are_the_tokens_that_the_file_has(tmp_path):
    tokenizer = load_tokenizer(save(tmp_path / "model.gguf", architecture="gemma3", kind="llama"))
    assert tokenizer.vocab_size == 4 + 256 + len(PIECES) + 1
    for text, pieces in (("t  ", ["t", "▁▁"]), ("    ", ["▁▁▁▁"])):
        assert tokenizer.encode(text, add_special_tokens=False) == [tokenizer.tokens[piece] for piece in pieces]


def test_the_chat_template_is_the_files(tmp_path):
    tokenizer = load_tokenizer(save(tmp_path / "x.gguf"))
    assert "<|im_start|>" in tokenizer.chat_template


def test_several_chat_templates_keep_their_names(tmp_path):
    templates = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    tokenizer = load_tokenizer(save(tmp_path / "x.gguf", kind="llama", chat_template=templates))
    assert tokenizer.chat_template == {"default": "a", "tool_use": "b"}


@pytest.mark.parametrize("kind", ["t5", "bert", "rwkv", "gemma4"])
def test_other_kinds_are_named(tmp_path, kind):
    with pytest.raises(ModelError, match=f"of the kind '{kind}', which cannot be built; may be gpt2, llama"):
        load_tokenizer(save(tmp_path / "x.gguf", kind=kind))


def test_an_unknown_pre_tokenizer_is_named_with_the_nearest(tmp_path):
    with pytest.raises(ModelError, match=r"pre-tokenizer 'lama-bpe' is not known; did you mean 'llama-bpe'"):
        load_tokenizer(save(tmp_path / "x.gguf", pre="lama-bpe"))


def test_a_token_outside_the_vocabulary_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"eos_token_id: got 5000; must be below"):
        load_tokenizer(save_two_words(tmp_path, Key("tokenizer.ggml.eos_token_id", U32, 5000)))


@pytest.mark.parametrize("role", ["padding", "unknown", "bos"])
def test_a_number_that_no_token_has_is_left_out_where_no_text_needs_it(tmp_path, role, caplog):
    key = f"tokenizer.ggml.{role}_token_id"
    tokenizer = load_tokenizer(save_two_words(tmp_path, Key(key, U32, (1 << 32) - 1)))
    assert f"{key}: got 4294967295; must be below 2, the number of tokens; it is left out" in caplog.text
    assert tokenizer.encode("ab") == [0, 1]


def test_a_number_that_no_token_has_cannot_begin_texts(tmp_path):
    keys = [Key("tokenizer.ggml.bos_token_id", U32, 5000), Key("tokenizer.ggml.add_bos_token", BOOL, True)]
    with pytest.raises(ModelError, match=r"bos_token_id: got 5000; must be below"):
        load_tokenizer(save_two_words(tmp_path, *keys))


def test_merges_of_unknown_tokens_are_an_error(tmp_path):
    with pytest.raises(ModelError, match="its tokenizer cannot be built"):
        load_tokenizer(save_two_words(tmp_path, Key("tokenizer.ggml.merges", ARRAY, ["a c"], STRING)))


def test_a_token_of_a_whole_text_is_refused(tmp_path):
    with pytest.raises(ModelError, match="has a token of 513 characters; may have at most 512"):
        load_tokenizer(save_two_words(tmp_path, words=["a", "b" * 513]))


@pytest.mark.parametrize(
    ("kind", "merges", "said"),
    [
        (1, ["a b"] * 4, None),
        (1, ["a b"] * 6, "3 tokens, 0 of them special, and 6 merges"),
        (3, [], "3 tokens, 3 of them special, and 0 merges"),
    ],
)
def test_a_vocabulary_of_more_parts_than_any_models_is_refused(tmp_path, monkeypatch, kind, merges, said):
    monkeypatch.setattr(tokenizer_module, "MOST_PARTS", 5)
    keys = [
        Key("tokenizer.ggml.token_type", ARRAY, [kind] * 3, I32),
        Key("tokenizer.ggml.merges", ARRAY, merges, STRING),
    ]
    with nullcontext() if said is None else pytest.raises(ModelError, match=said):
        load_tokenizer(save_two_words(tmp_path, *keys, words=["a", "b", "ab"]))


def test_a_score_for_each_piece_is_needed(tmp_path):
    with pytest.raises(ModelError, match="has 2 tokens, but 3 scores"):
        load_tokenizer(save_two_words(tmp_path, kind="llama", scores=[0.0, 0.0, 0.0]))


def test_a_score_that_is_no_number_is_refused(tmp_path):
    with pytest.raises(ModelError, match="score of a token is not a number"):
        load_tokenizer(save_two_words(tmp_path, kind="llama", scores=[0.0, math.nan]))


def save_two_words(tmp_path, *keys, architecture="llama", kind="gpt2", scores=(), words=("a", "b")):
    """A file whose vocabulary is a and b."""
    merges = (
        []
        if any(key.name.endswith("merges") for key in keys) or scores
        else [Key("tokenizer.ggml.merges", ARRAY, [], STRING)]
    )
    found = [Key("general.architecture", STRING, architecture), Key("tokenizer.ggml.model", STRING, kind)]
    found += [Key("tokenizer.ggml.tokens", ARRAY, words, STRING), *merges, *keys]
    if scores:
        found.append(Key("tokenizer.ggml.scores", ARRAY, scores, F32))
    path = tmp_path / "x.gguf"
    path.write_bytes(gguf_bytes(found))
    return path
