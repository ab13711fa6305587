"""What tokens spell, whatever notation their tokenizer writes them in."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, decoders
from tokenizers import Tokenizer as RawTokenizer
from tokenizers.models import BPE, Unigram

from forerun.errors import ModelError
from forerun.models.tokenizer import Tokenizer, load_tokenizer
from forerun.models.tokenizer_files import parts_of
from forerun.models.vocabulary import read_vocabulary
from tests.foreign import MARKS, byte_level, sentencepiece
from tests.tiny_tokenizer import save_tiny_tokenizer


def vocabulary(fast_tokenizer, vocab_size=10**6):
    return Tokenizer(parts_of(fast_tokenizer)).vocabulary(vocab_size)


def read_raw(raw):
    return read_vocabulary(raw, vocab_size=10**6, ends=None, begins=None, unknown=None)


def test_byte_level_letters_are_bytes(tmp_path):
    tokenizer = load_tokenizer(save_tiny_tokenizer(tmp_path))
    read = tokenizer.vocabulary(264)
    for text in ("he", "é", "\n ", "🙂", "\x7f\xad\xa0"):
        assert b"".join(read.spellings[i] for i in tokenizer.encode(text)) == text.encode()
    assert sorted(spelling for spelling in read.text_ids if len(spelling) == 1) == [bytes([b]) for b in range(256)]


def test_sentencepieces_words_are_text_and_its_byte_tokens_bytes():
    read = vocabulary(sentencepiece([*MARKS, "▁the", "é", "<0xC3>", "▁▁", "<0x0a>", "x▁"]))
    spellings = [read.spellings[token_id] for token_id in range(3, 9)]
    assert spellings == [b" the", "é".encode(), b"\xc3", b"  ", b"<0x0a>", b"x "]


def test_a_unigram_tokenizer_with_a_metaspace_is_read():
    raw = RawTokenizer(Unigram([("<unk>", 0.0), ("▁a", -1.0), ("b", -2.0)], unk_id=0))
    raw.decoder = decoders.Metaspace()
    raw.add_special_tokens([AddedToken("<unk>", special=True)])
    assert read_raw(raw).text_ids == {b" a": 1, b"b": 2}


def test_special_tokens_spell_nothing_and_other_added_ones_their_content():
    fast = byte_level([*MARKS, "a"])
    fast.add_tokens([AddedToken("<think>"), AddedToken("two words")])
    read = vocabulary(fast)
    assert read.spellings == {3: b"a", 4: b"<think>", 5: b"two words"}
    assert read.marks == {MARKS[0]: 0, MARKS[1]: 1, MARKS[2]: 2, "<think>": 4, "two words": 5}
    assert (read.begins, read.ends, read.unknown) == (0, 2, None)


def test_of_tokens_that_spell_the_same_the_lowest_is_reserved_but_byte_tokens_last():
    read = vocabulary(sentencepiece([*MARKS, "<0x41>", "A", "▁", "<0x20>", "<0x42>"]))
    assert read.text_ids == {b"A": 4, b" ": 5, b"B": 7}


def test_tokens_beyond_the_logits_are_left_out():
    read = vocabulary(byte_level(["a", "b", *MARKS]), vocab_size=4)
    assert read.text_ids == {b"a": 0, b"b": 1}
    assert (read.marks, read.begins, read.ends) == ({MARKS[0]: 2, MARKS[1]: 3}, 2, None)


def test_the_longest_ending_that_is_a_token_is_found():
    read = vocabulary(byte_level([*MARKS, "he", "e", "Ġhe"]))
    assert [read.ending_of(spelling) for spelling in (b" she", b"the he", b"ee", b"x", b"")] == [3, 5, 4, None, None]


@pytest.mark.parametrize(
    ("decoder", "kind"),
    [(None, "none"), (decoders.WordPiece(), "WordPiece"), (decoders.Sequence([decoders.CTC()]), "CTC")],
)
def test_an_unknown_notation_is_refused(decoder, kind):
    raw = RawTokenizer(BPE(vocab={"a": 0}, merges=[]))
    if decoder is not None:
        raw.decoder = decoder
    with pytest.raises(ModelError, match=f"its tokens are written for the decoder {kind}; must be byte-level"):
        read_raw(raw)
