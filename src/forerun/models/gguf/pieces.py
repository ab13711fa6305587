"""The pieces of a vocabulary in a GGUF file and their merges: found once, and kept for the next start beside packed weights.

Reading the words of a large vocabulary and finding its merges takes half of the time that its tokenizer does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from forerun.models.gguf.file import GGUFFile
from forerun.models.gguf.merges import MergedIds
from forerun.models.kept_weights import KeptWeights
from forerun.models.packed_cache import PackedCache, PackedModel
from forerun.ops.native.library import best_kernels
from forerun.ops.native.memory import map_file

END_TOKENS = (
    *("<|endoftext|>", "<|end_of_text|>", "<eos>", "</s>", "[EOS]", "<｜end▁of▁sentence｜>"),  # of a text
    *("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<turn|>", "<EOT>", "_<EOT>", "[EOT]"),  # of a turn
    *("<end_of_utterance>", "<|return|>", "<|flush|>", "[e~["),
    *("<|eom_id|>", "<|call|>", "<|calls|>", "<|tool_response>"),  # of a message that calls tools
    *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),  # of code that fills a gap,
    *("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>"),  # and of its file
)
"""Words that end an answer in whichever vocabulary they are, as in llama.cpp: files often name one end of several, and
some take them for ordinary words. See `end_tokens`."""

GEMMA = ("gemma", "gemma2", "gemma3")
"""Architectures with Gemma's vocabulary."""

NO_END_TOKENS = dict.fromkeys(GEMMA, ("</s>",)) | {"gpt-oss": ("<|end|>",)}
"""By architecture, those that end none there: in Gemma's vocabulary </s> is one of HTML's tags, as </strong> is; gpt-oss writes
<|end|> between what it thinks and what it says."""

BETWEEN = "\0"  # words; a vocabulary with such a word is not kept
WORDS = "words"  # in the file: UTF-8, [bytes] uint8
MERGES = "merges"  # in the file: ids of their two parts, [merges, 2] int32
MOST_BYTES = 1 << 25  # of both: Gemma 3's take 4.5 MB; there may be room for them where there is none for weights


def end_tokens(file: GGUFFile) -> list[str]:
    """The words that end an answer in this file's vocabulary."""
    others = NO_END_TOKENS.get(file.architecture, ())
    return [word for word in END_TOKENS if word not in others]


@dataclass(frozen=True, slots=True)
class Pieces:
    """A vocabulary: its words by id, the ids by word (of equal words the last), and the merges in their order as ids."""

    words: Sequence[str]
    ids: dict[str, int]
    merges: MergedIds


def ids_by_word(words: Sequence[str]) -> dict[str, int]:
    """The id of each word; of equal ones the last."""
    return dict(zip(words, range(len(words)), strict=True))


def kept_pieces(file: GGUFFile, find: Callable[[], Pieces]) -> Pieces:
    """The pieces that an earlier start kept, or else what `find` reads from the file, which is kept.

    That they cannot be kept is no warning: the weights are larger, and go to the same folder.

    Raises:
        ConfigError: the environment variable of the cache is no size.
    """
    kernels = best_kernels()  # without which other merges are found
    level = "none" if kernels is None else kernels.level
    model = PackedModel(path=file.path, format="tokenizer", level=level, dtype="utf-8")
    cache = PackedCache.of_environment()
    with cache.weights(model, expected_bytes=MOST_BYTES, read=map_file, log_level=logging.INFO) as kept:
        pieces = _mapped(kept)
        if pieces is None:
            pieces = find()
            _keep(pieces, kept)
    return pieces


def _mapped(kept: KeptWeights) -> Pieces | None:
    text, pairs = kept.find_tensor(WORDS), kept.find_tensor(MERGES)
    if text is None or pairs is None:
        return None
    words = str(text.numpy().data, "utf-8").split(BETWEEN)
    return Pieces(words, ids_by_word(words), pairs.numpy())


def _keep(pieces: Pieces, kept: KeptWeights) -> None:
    """Keep pieces, unless their words could not be told apart."""
    text = BETWEEN.join(pieces.words)
    if text.count(BETWEEN) == len(pieces.words) - 1:
        kept.add(WORDS, torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8))
        kept.add(MERGES, torch.from_numpy(pieces.merges))
