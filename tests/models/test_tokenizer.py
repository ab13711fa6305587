import functools
import shutil
import time
from dataclasses import replace
from itertools import chain

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from forerun.errors import ModelError, RequestError
from forerun.models.tokenizer import LONG_TEXT, MOST_HELD_TOKENS, TextStream, Tokenizer, load_tokenizer
from forerun.models.tokenizer_files import parts_of
from tests.tiny_tokenizer import save_tiny_tokenizer

IM_START, IM_END = 1, 2
DEEP = functools.reduce(lambda inner, _: [inner], range(5000), [])
USER = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def byte_ids(tokenizer):
    """Token id of each byte that can stand in UTF-8."""
    one_of_each_first_byte = [
        *range(0x880),
        *range(0x1000, 0xD800, 0x1000),
        0xE000,
        0xF000,
        *range(0x10000, 0x110000, 0x10000),
    ]
    texts = map(chr, one_of_each_first_byte)
    return {byte: token for text in texts for byte, token in zip(text.encode(), tokenizer.encode(text), strict=True)}


def push_all(stream, ids):
    return "".join(stream.push(token_id) for token_id in ids)


@given(text=st.text())
@example(text="a<|endoftext|>b")
@settings(deadline=None, max_examples=50)
def test_decoding_an_encoded_text_gives_the_text(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_special_tokens_in_a_text_are_single_tokens_that_decoding_skips(tokenizer):
    ids = tokenizer.encode("a<|im_end|>")
    assert ids[1:] == [IM_END]
    assert tokenizer.decode(ids) == "a"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<|im_end|>"


def test_encoding_equals_that_of_transformers(folder, tokenizer):
    text = "<|im_start|>the héllo 🙂"
    assert tokenizer.encode(text) == AutoTokenizer.from_pretrained(folder).encode(text)


def test_a_truncation_limit_in_tokenizer_json_does_not_cut_prompts(tmp_path):
    raw = RawTokenizer.from_file(str(save_tiny_tokenizer(tmp_path) / "tokenizer.json"))
    raw.enable_truncation(4)
    raw.save(str(tmp_path / "tokenizer.json"))
    assert len(load_tokenizer(tmp_path).encode("x" * 10)) == 10


@pytest.mark.parametrize("text", ["\ud800", None, 3])
def test_what_is_not_unicode_text_is_a_request_error(tokenizer, text):
    with pytest.raises(RequestError, match="text: got"):
        tokenizer.encode(text)


def test_vocabulary_and_special_ids_are_those_of_the_files(tokenizer):
    assert (tokenizer.vocab_size, tokenizer.bos_token_id, tokenizer.eos_token_id) == (264, 0, IM_END)
    assert tokenizer.token_text(IM_END) == "<|im_end|>"
    assert (tokenizer.id_of("<|im_end|>"), tokenizer.id_of("<|im_start|><|im_end|>")) == (IM_END, None)


def test_the_vocabulary_is_counted_once(tokenizer):
    """Who compares every token of a request with it would count hundreds of thousands of times."""

    class Counting:
        num_counts = 0

        def __getattr__(self, name):
            return getattr(tokenizer._backend, name)

        def get_vocab_size(self, **options):
            self.num_counts += 1
            return tokenizer._backend.get_vocab_size(**options)

    counting = Counting()
    counted = Tokenizer(replace(tokenizer._parts, backend=counting))
    assert [counted.vocab_size for _ in range(3)] == [264] * 3
    assert counting.num_counts == 1


def test_a_conversation_is_laid_out_by_the_models_template(tokenizer):
    ids = tokenizer.apply_chat_template([USER])
    text = tokenizer.decode(ids, skip_special_tokens=False)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.apply_chat_template([USER], tokenize=False) == text


def test_a_conversation_has_the_ids_that_transformers_gives_it(folder, tokenizer):
    expected = AutoTokenizer.from_pretrained(folder).apply_chat_template([USER], return_dict=False)
    assert tokenizer.apply_chat_template([USER], add_generation_prompt=False) == expected


def test_without_generation_prompt_the_conversation_ends_with_its_last_message(tokenizer):
    ids = tokenizer.apply_chat_template([USER], add_generation_prompt=False)
    assert tokenizer.decode(ids, skip_special_tokens=False).endswith("hi<|im_end|>\n")


def test_continuing_the_final_message_leaves_it_open(tokenizer):
    messages = [USER, {"role": "assistant", "content": "Well"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=False, continue_final_message=True)
    assert tokenizer.decode(ids, skip_special_tokens=False).endswith("assistant\nWell")


def test_a_given_template_replaces_the_models_and_sees_further_arguments(tokenizer):
    ids = tokenizer.apply_chat_template([USER], chat_template="{{ mood }}{{ messages[0].content }}", mood="oh ")
    assert tokenizer.decode(ids) == "oh hi"


def test_generation_prompt_and_continuation_together_are_a_request_error(tokenizer):
    with pytest.raises(RequestError, match="add_generation_prompt=False"):
        tokenizer.apply_chat_template([USER], continue_final_message=True)


READS_TOOLS = (
    "{% if not tools is defined %}{% set tools = none %}{% endif %}{% if tools %}{{ tools | tojson }}{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (None, None),
        ("{{ messages }}", None),
        ("{% if tools %", None),
        (READS_TOOLS, READS_TOOLS),
        ({"default": "{{ messages }}", "tool_use": READS_TOOLS}, READS_TOOLS),
        ({"default": "{{ messages }}", "rag": READS_TOOLS}, None),
    ],
)
def test_the_template_that_reads_tools_is_known(tmp_path, template, expected):
    tokenizer = load_tokenizer(save_tiny_tokenizer(tmp_path, chat_template=template))
    assert tokenizer.tool_template == expected


def test_a_missing_chat_template_is_a_request_error_that_says_what_to_do(tmp_path):
    tokenizer = load_tokenizer(save_tiny_tokenizer(tmp_path, chat_template=None))
    assert not tokenizer.has_chat_template
    with pytest.raises(RequestError, match="give one, or lay out the prompt"):
        tokenizer.apply_chat_template([USER])


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('no') }}", "{% if %}", "{{ messages[7].content.x }}", "{{ 1 + 'a' }}"]
)
def test_a_template_that_fails_is_a_request_error(tokenizer, template):
    with pytest.raises(RequestError, match="chat template refuses"):
        tokenizer.apply_chat_template([USER], chat_template=template)


def test_a_folder_without_tokenizer_is_a_model_error(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelError, match=r"must hold tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_a_missing_folder_is_a_model_error(tmp_path):
    with pytest.raises(ModelError, match="no such folder"):
        load_tokenizer(tmp_path / "absent")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_damaged_file_is_a_model_error_that_names_it(folder, tmp_path, name):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / name).write_text("{")
    with pytest.raises(ModelError, match=f"{name} is not JSON"):
        load_tokenizer(tmp_path)


def test_a_slow_tokenizer_is_refused():
    class Slow:
        is_fast = False

    with pytest.raises(ModelError, match="fast tokenizer"):
        parts_of(Slow())


TEXTS = st.one_of(
    st.text().map(str.encode),
    st.text(alphabet="aé漢🙂\ufffd \n").map(str.encode),
    st.binary(max_size=60),
    st.lists(st.sampled_from([b"\xf0\x9f", b"\x99\x82", "é".encode(), b"\xe6", b"a", b"\x80"]), max_size=60).map(
        b"".join
    ),
)


@given(prompt=st.text(alphabet="ab🙂"), data=TEXTS)
@example(prompt="", data=b"\x80" * 100)
@example(prompt="a", data=b"\xf0\x9f\x99" * 30 + b"\xf0\x9f\x99\x82")
@settings(deadline=None, max_examples=300)
def test_pushed_texts_together_are_the_decoded_text_up_to_what_may_be_incomplete(tokenizer, byte_ids, prompt, data):
    ids = [byte_ids[byte] for byte in data if byte in byte_ids]
    whole = tokenizer.decode(ids)
    pushed = push_all(TextStream(tokenizer, tokenizer.encode(prompt)), ids)
    assert whole.startswith(pushed)
    assert set(whole[len(pushed) :].rstrip("\ufffd")) == set()


# A special token written out counts as one, and its text is not shown: keep "<|" out.
VALID = st.text(alphabet=st.characters(exclude_characters="\ufffd|", exclude_categories=["Cs"]))


def test_a_token_of_whole_characters_is_not_decoded_again(tokenizer, monkeypatch):
    ids = tokenizer.encode("plain words, one after the other, and again plain words")
    stream = tokenizer.stream(ids[:3])
    for token_id in ids:
        tokenizer.whole_text(token_id)
    num_decoded, decode = [], Tokenizer.decode
    monkeypatch.setattr(Tokenizer, "decode", lambda *args, **kw: num_decoded.append(1) or decode(*args, **kw))
    text = "".join(stream.push(token_id) for token_id in ids[3:])
    assert decode(tokenizer, ids[:3]) + text == decode(tokenizer, ids)
    assert not num_decoded


def test_what_a_token_spells_is_taken_for_granted_only_in_byte_level_vocabularies(tokenizer, sentencepiece_tokenizer):
    word = tokenizer.encode("plain")[0]
    assert tokenizer.whole_text(word) == tokenizer.token_text(word)
    assert tokenizer.whole_text(tokenizer.tokens["Ã"]) is None, "the first half of a character"
    assert all(sentencepiece_tokenizer.whole_text(i) is None for i in range(sentencepiece_tokenizer.vocab_size))


@given(text=VALID)
@settings(deadline=None, max_examples=100)
def test_no_push_returns_a_replacement_character_for_valid_text(tokenizer, text):
    stream = TextStream(tokenizer, tokenizer.encode("x"))
    pushed = [stream.push(token_id) for token_id in tokenizer.encode(text)]
    assert "".join(pushed) == text
    assert not any("\ufffd" in piece for piece in pushed)


@given(head=VALID, tail=VALID, data=st.data())
@settings(deadline=None, max_examples=100)
def test_a_character_begun_in_the_prompt_is_completed_by_the_first_tokens(tokenizer, head, tail, data):
    ids = tokenizer.encode(head + tail)
    cut = data.draw(st.integers(0, len(ids)))
    before = tokenizer.decode(ids[:cut]).rstrip("\ufffd")
    assert before + push_all(TextStream(tokenizer, ids[:cut]), ids[cut:]) == head + tail


def test_a_replacement_character_that_the_prompt_ends_with_is_not_repeated(tokenizer):
    stream = TextStream(tokenizer, tokenizer.encode("odd \ufffd"))
    assert push_all(stream, tokenizer.encode("yes")) == "yes"


def test_an_incomplete_character_at_the_end_is_never_emitted(tokenizer):
    assert push_all(TextStream(tokenizer, []), tokenizer.encode("a🙂")[:-1]) == "a"


def test_a_run_of_invalid_bytes_is_emitted_though_it_never_ends(tokenizer, byte_ids):
    stream = TextStream(tokenizer, [])
    pushed = push_all(stream, [byte_ids[0x80]] * 100)
    assert 100 - MOST_HELD_TOKENS - 4 <= len(pushed) < 100


def test_special_tokens_are_skipped_or_shown_as_asked(tokenizer):
    ids = [*tokenizer.encode("a"), IM_END, *tokenizer.encode("b")]
    assert push_all(TextStream(tokenizer, [IM_START]), ids) == "ab"
    assert push_all(TextStream(tokenizer, [IM_START], skip_special_tokens=False), ids) == "a<|im_end|>b"


def test_skipped_tokens_do_not_pile_up(tokenizer):
    stream = TextStream(tokenizer, [])
    push_all(stream, [IM_END] * 1000)
    assert len(stream._window) == 0


def test_ids_beyond_the_vocabulary_have_no_text(tokenizer):
    assert push_all(TextStream(tokenizer, []), [9999, *tokenizer.encode("a"), 9999]) == "a"


def test_tokens_without_text_do_not_pile_up(tokenizer):
    stream = TextStream(tokenizer, tokenizer.encode("a"))
    assert push_all(stream, [9999] * 1000) == ""
    assert len(stream._window) < MOST_HELD_TOKENS
    assert push_all(stream, tokenizer.encode("b")) == "b"


WORDS = ["▁the", "▁cat", "s", "▁", "<0xE2>", "<0x82>", "<0xAC>", "<s>"]


@pytest.fixture(scope="module")
def sentencepiece_tokenizer():
    """A tokenizer in the manner of Llama 2: spaces as ▁, the first one stripped, bytes as a last resort."""
    raw = RawTokenizer(models.BPE({word: index for index, word in enumerate(WORDS)}, [], byte_fallback=True))
    raw.add_special_tokens(["<s>"])
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(parts_of(PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>")))


WHOLE_CHARACTERS = st.lists(st.sampled_from([[0], [1], [2], [3], [7], [4, 5, 6]])).map(lambda runs: [*chain(*runs)])


@given(ids=WHOLE_CHARACTERS)
@settings(deadline=None, max_examples=200)
def test_spaces_survive_decoders_that_strip_the_first_one(sentencepiece_tokenizer, ids):
    pushed = push_all(TextStream(sentencepiece_tokenizer, []), ids)
    assert pushed == sentencepiece_tokenizer.decode(ids)


def test_after_a_prompt_the_first_word_keeps_its_space(sentencepiece_tokenizer):
    assert push_all(TextStream(sentencepiece_tokenizer, [7, 0]), [1, 2]) == " cats"


@given(ids=st.lists(st.integers(0, len(WORDS) - 1)))
@settings(deadline=None, max_examples=200)
def test_any_order_of_byte_tokens_streams_without_an_error(sentencepiece_tokenizer, ids):
    pushed = push_all(TextStream(sentencepiece_tokenizer, []), ids)
    assert len(pushed) <= sum(len(WORDS[token_id]) for token_id in ids)


class BytePieces:
    """A tokenizer whose tokens are given pieces of UTF-8, not aligned to characters."""

    special_token_ids = frozenset()

    def __init__(self, *pieces: bytes) -> None:
        self._pieces = pieces

    def whole_text(self, token_id):
        return None

    def decode(self, ids, *, skip_special_tokens=True):
        return b"".join(self._pieces[token_id] for token_id in ids).decode(errors="replace")


def test_the_certain_part_of_a_token_that_ends_within_a_character_is_given_at_once():
    stream = TextStream(BytePieces(b"a", b"b \xf0\x9f", b"\x98\x80!"), [0])
    assert [stream.push(1), stream.push(2)] == ["b ", "\N{GRINNING FACE}!"]


def test_a_long_text_is_encoded_as_a_short_one(tmp_path):
    tokenizer = load_tokenizer(save_tiny_tokenizer(tmp_path))
    short = "hello <|im_end|> ✓ "
    repeated = short * (LONG_TEXT // len(short) + 2)
    assert tokenizer.encode(repeated) == tokenizer.encode(short) * (LONG_TEXT // len(short) + 2)
    with pytest.raises(RequestError):
        tokenizer.encode("a" * LONG_TEXT + "\ud800")


def test_many_tokens_are_decoded_as_few(tmp_path):
    tokenizer = load_tokenizer(save_tiny_tokenizer(tmp_path))
    ids = tokenizer.encode("hello <|im_end|> ✓ ")
    repeats = LONG_TEXT // len(ids) + 2
    for skips in (False, True):
        few = tokenizer.decode(ids, skip_special_tokens=skips)
        assert tokenizer.decode(ids * repeats, skip_special_tokens=skips) == few * repeats


def test_the_variables_of_a_template_are_known(tmp_path):
    template = (
        "{%- for message in messages %}{% generation %}{{ message.content if not quiet else bos_token }}"
        "{% endgeneration %}{% endfor %}{% if add_generation_prompt and enable_thinking %}...{% endif %}"
    )
    tokenizer = load_tokenizer(save_tiny_tokenizer(tmp_path, chat_template=template))
    assert tokenizer.template_variables == {"quiet", "enable_thinking"}


@pytest.mark.parametrize(
    "bomb",
    [
        "{{ 10 ** (10 ** 10) }}",
        "{{ 'a' * 10 ** 11 }}",
        "{{ 'a'|center(10000000000000) }}",
        "{{ '%10000000000d' % 1 }}",
        "{% autoescape 9 ** (9 ** 9) %}{% endautoescape %}",
        "{{ -(9 ** (9 ** 9)) }}",
        "{{ " + "(" * 10_000 + "1" + ")" * 10_000 + " }}",
    ],
)
def test_nothing_in_a_template_is_worked_out_to_find_its_variables(tmp_path, bomb):
    tokenizer = load_tokenizer(save_tiny_tokenizer(tmp_path, chat_template="{{ mood|upper }}" + bomb))
    begin = time.monotonic()
    assert tokenizer.template_variables in ({"mood"}, frozenset())
    assert time.monotonic() - begin < 5


@pytest.mark.parametrize(
    "messages", [[{"role": "user", "content": "a", "deep": DEEP}], [{"role": "user", "content": "\ud800"}]]
)
def test_messages_that_no_template_can_take_are_refused(tmp_path, messages):
    tokenizer = load_tokenizer(
        save_tiny_tokenizer(tmp_path, chat_template="{{ messages|tojson }}{{ messages[0].content }}")
    )
    with pytest.raises(RequestError):
        tokenizer.apply_chat_template(messages)
