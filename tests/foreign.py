"""Models whose tokens are another's in another order and another notation: SentencePiece's instead of byte-level."""

from __future__ import annotations

import json
import random
import shutil

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as RawTokenizer
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from forerun.models.tokenizer import Tokenizer
from forerun.models.tokenizer_files import parts_of

LETTER_OF = bytes_to_unicode()
BYTE_OF = {letter: byte for byte, letter in LETTER_OF.items()}
MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
FEW_SPELLINGS = [*(bytes([byte]) for byte in range(0x20, 0x7A)), b" the", b"he", "é".encode(), "é".encode()[:1]]


def byte_level(words, *, marks=MARKS, eos=MARKS[2]):
    """A tokenizer of byte-level words in the order of their ids; those of `marks` are special."""
    return _wrapped(words, marks, decoders.ByteLevel(), eos=eos)


def sentencepiece(words, *, marks=MARKS, eos=MARKS[2]):
    """A tokenizer of SentencePiece's words in the order of their ids."""
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return _wrapped(words, marks, decoders.Sequence(steps), eos=eos)


def _wrapped(words, marks, decoder, *, eos):
    vocab = {word: index for index, word in enumerate(words)}
    tokenizer = RawTokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=marks[0], eos_token=eos)


def few_tokens():
    """A byte-level tokenizer of 97 tokens."""
    words = [*MARKS, *("".join(LETTER_OF[byte] for byte in spelling) for spelling in FEW_SPELLINGS)]
    return Tokenizer(parts_of(byte_level(words)))


def save_foreign_twin(folder, original, tokenizer, *, num_missing=0):
    """Save the model in `original`, whose byte-level `tokenizer` is given, with its tokens shuffled and spelled anew.

    `num_missing` of the tokens are left out; 30 byte tokens that spell what others spell are put in,
    with random weights.
    """
    source = random.Random(0)
    kept = source.sample(range(tokenizer.vocab_size), tokenizer.vocab_size - num_missing)
    words = {index: word for word, index in tokenizer.tokens.items()}
    words = [_spelled_anew(words[index]) for index in kept]
    extra = [f"<0x{byte:02X}>" for byte in range(0x41, 0x5F)]
    shutil.copytree(original, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("token*", "special*"))
    marks = [word for word in words if word in MARKS]
    sentencepiece([*extra, *words], marks=marks, eos=marks[-1]).save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        random_rows = torch.randn(len(extra), weights[name].shape[1], generator=generator)
        weights[name] = torch.cat([random_rows, weights[name][kept]])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": len(extra) + len(kept)}))
    return folder


def _spelled_anew(word):
    """A byte-level word in SentencePiece's notation, which has byte tokens for what is no character."""
    if word in MARKS:
        return word
    spelling = bytes(BYTE_OF[letter] for letter in word)
    try:
        text = spelling.decode()
    except UnicodeDecodeError:
        text = ""
    return text.replace(" ", "▁") if text.isprintable() and text else "".join(f"<0x{byte:02X}>" for byte in spelling)
