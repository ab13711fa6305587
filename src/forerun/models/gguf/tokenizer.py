"""The tokenizer of a model in a GGUF file, built from the file's metadata.

Two kinds of vocabulary are read: byte-level BPE ("gpt2"), whose merges are in the file, and SentencePiece's BPE ("llama"),
whose merges follow from the pieces' scores. Both become what the original model's tokenizer.json would be.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from forerun.errors import ForerunError, ModelError, did_you_mean, one_line
from forerun.models.gguf.file import GGUFFile
from forerun.models.gguf.merges import MergedIds, MergesById, ids_of, used_merges_of
from forerun.models.gguf.metadata import Metadata
from forerun.models.gguf.pieces import GEMMA, Pieces, end_tokens, ids_by_word, kept_pieces
from forerun.models.gguf.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from forerun.ops.native.library import best_kernels
from forerun.ops.native.memory import give_back_freed_memory

logger = logging.getLogger(__name__)

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4  # types of tokens
SPACE = "\u2581"  # SentencePiece's
LONGEST_PIECE = 512  # characters; there are runs of 256 spaces
MOST_PARTS = 640_000
"""Of a vocabulary, each a third of a KB in memory: a word, two merges, or half of what makes a token that is found whole."""

OTHER_TOKENIZER = "put the original model's tokenizer.json and tokenizer_config.json beside it and give the folder, or give theirs as tokenizer="
ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
NEVER_STRIPPING = ("<unk>", "<s>", "<|endoftext|>")  # of Phi-3's special tokens: they leave the white space behind them
BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))  # tokens of bytes that no other token spells


def build_tokenizer(file: GGUFFile) -> tuple[Tokenizer, dict[str, str]]:
    """Build the tokenizer; return it and the special tokens by their role (eos_token, bos_token, ...).

    Raises:
        ModelError: the kind of vocabulary or its pre-tokenizer is not known, or it is damaged.
    """
    check_tokenizer(file)
    metadata = file.metadata.below("tokenizer.ggml")
    try:
        pieces = kept_pieces(file, lambda: _find_pieces(file))
        words = pieces.words
        tokenizer, adds_bos = KINDS[metadata.text("model")](file, metadata, pieces)
        _add_tokens(tokenizer, pieces, _types(metadata), end_tokens(file), rstrips=_rstrips(file))
        adds_bos = metadata.flag("add_bos_token", adds_bos)
        needed = ("eos", "bos") if adds_bos else ("eos",)
        special = {
            role: word
            for role, key in ROLES.items()
            if (word := _word(file, metadata, words, key, is_needed=key in needed)) is not None
        }
        bos = special.get("bos_token") if adds_bos else None
        eos = special.get("eos_token") if metadata.flag("add_eos_token", False) else None
        tokenizer.post_processor = _around(tokenizer, bos, eos)
    except ForerunError:
        raise
    except Exception as error:  # tokenizers raises no narrower type
        raise ModelError(
            f"{file.path}: its tokenizer cannot be built ({one_line(error)}); download it again"
        ) from error
    return tokenizer, special


def check_tokenizer(file: GGUFFile) -> None:
    """Check that the file has a tokenizer of a kind that can be built.

    Raises:
        ModelError: it has none, or one of another kind or of more parts than any model's.
    """
    metadata = file.metadata.below("tokenizer.ggml")
    if "model" not in metadata:
        raise ModelError(f"{file.path}: holds no tokenizer; {OTHER_TOKENIZER}")
    kind = metadata.text("model")
    if kind not in KINDS:
        raise ModelError(
            f"{file.path}: its tokenizer is of the kind {kind!r:.80}, which cannot be built; may be {', '.join(KINDS)}; "
            f"{OTHER_TOKENIZER}"
        )
    if kind == "gpt2":
        _pre_tokenizer(file, metadata)
    _check_size(file, metadata)


def _check_size(file: GGUFFile, metadata: Metadata) -> None:
    words, merges = metadata.count("tokens"), metadata.count("merges") if "merges" in metadata else 0
    added = int(np.isin(_types(metadata), (UNKNOWN, CONTROL, USER_DEFINED)).sum())
    if words + merges // 2 + 2 * added > MOST_PARTS:
        raise ModelError(
            f"{file.path}: its tokenizer has {words} tokens, {added} of them special, and {merges} merges, more than can be "
            f"built in little memory; download it again, or {OTHER_TOKENIZER}"
        )


def _types(metadata: Metadata) -> np.ndarray:
    return metadata.numbers("token_type") if "token_type" in metadata else np.zeros(0)


def chat_template(file: GGUFFile) -> str | dict[str, str] | None:
    """The chat template, or several by their names, as a tokenizer_config.json has them."""
    metadata = file.metadata.below("tokenizer")
    if "chat_template" not in metadata:
        return None
    default = metadata.text("chat_template")
    names = metadata.strings("chat_templates") if metadata.is_array("chat_templates") else []
    others = {name: metadata.text(f"chat_template.{name}") for name in names if f"chat_template.{name}" in metadata}
    return {"default": default, **others} if others else default


def _find_pieces(file: GGUFFile) -> Pieces:
    """Read the words, and read or find how BPE puts them together."""
    metadata = file.metadata.below("tokenizer.ggml")
    words = metadata.strings("tokens")
    longest = max(map(len, words), default=0)
    if longest > LONGEST_PIECE:
        raise ModelError(
            f"{file.path}: has a token of {longest} characters; may have at most {LONGEST_PIECE}; download it again"
        )
    if file.architecture in GEMMA:  # whose runs of spaces are stored as spaces
        words = [SPACE * len(word) if word.isspace() and " " in word else word for word in words]
    ids = ids_by_word(words)
    if metadata.text("model") == "gpt2" or "merges" in metadata:
        return Pieces(words, ids, ids_of(map(_pair, metadata.strings("merges")), ids))
    return Pieces(words, ids, _found_merges(file, metadata, words, ids))


def _found_merges(file: GGUFFile, metadata: Metadata, words: Sequence[str], ids: dict[str, int]) -> MergedIds:
    """The merges of a SentencePiece vocabulary."""
    is_gemma = file.architecture in GEMMA
    by_place = -np.arange(len(words), dtype=np.float64)  # Gemma's merges are in the order of the pieces
    scores = by_place if is_gemma else metadata.numbers("scores").astype(np.float64)
    if len(scores) != len(words):
        raise ModelError(f"{file.path}: has {len(words)} tokens, but {len(scores)} scores; download it again")
    if np.isnan(scores).any():
        raise ModelError(f"{file.path}: the score of a token is not a number; download it again")
    unknown = _unknown(file, metadata, words)
    merges = used_merges_of(ids, scores, kernels=best_kernels(), given=[*BYTES, *([unknown] if unknown else [])])
    give_back_freed_memory()  # of what found the merges, before they are copied
    return merges


def _unknown(file: GGUFFile, metadata: Metadata, words: Sequence[str]) -> str | None:
    """What stands for a character that cannot be spelled; a vocabulary with all bytes but Gemma's has none."""
    return words[metadata.integer("unknown_token_id", 0)] if file.architecture in GEMMA else None


def _byte_level(file: GGUFFile, metadata: Metadata, pieces: Pieces) -> tuple[Tokenizer, bool]:
    pre_tokenizer = _pre_tokenizer(file, metadata)
    if "pre" not in metadata:
        logger.warning(
            "%s: does not say how its vocabulary cuts texts into words (tokenizer.ggml.pre); they are cut as in llama.cpp, "
            "perhaps otherwise than in training; convert the original model again, or give its tokenizer as tokenizer=",
            file.path,
        )
    merges: Any = MergesById(pieces.merges, pieces.words)
    model = BPE(
        vocab=pieces.ids,
        merges=merges,
        ignore_merges=pre_tokenizer.takes_whole_words,
        continuing_subword_prefix="",
        end_of_word_suffix="",
        fuse_unk=False,
    )
    tokenizer = Tokenizer(model)
    if normalizer := pre_tokenizer.normalizer():
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizer.pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, pre_tokenizer.adds_bos


def _pre_tokenizer(file: GGUFFile, metadata: Metadata) -> PreTokenizer:
    name = metadata.text("pre", "default")
    if name not in PRE_TOKENIZERS:
        raise ModelError(
            f"{file.path}: its pre-tokenizer {name!r:.80} is not known"
            f"{did_you_mean(name, PRE_TOKENIZERS)}; {OTHER_TOKENIZER}"
        )
    return PRE_TOKENIZERS[name]


def _pair(merge: str) -> tuple[str, str]:
    """Two tokens, which are written with a space between them."""
    space = merge.find(" ", 1)
    return merge[:space], merge[space + 1 :]


def _sentence_piece(file: GGUFFile, metadata: Metadata, pieces: Pieces) -> tuple[Tokenizer, bool]:
    is_gemma = file.architecture in GEMMA
    unknown = _unknown(file, metadata, pieces.words)
    merges: Any = MergesById(pieces.merges, pieces.words)
    model = BPE(vocab=pieces.ids, merges=merges, fuse_unk=True, byte_fallback=True, unk_token=unknown)
    tokenizer = Tokenizer(model)
    decoder: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    adds_space = not is_gemma and metadata.flag("add_space_prefix", True)
    if is_gemma:
        tokenizer.normalizer = normalizers.Replace(" ", SPACE)
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    else:  # a text after a token that is found whole begins with a space, too
        prepends = [normalizers.Prepend(SPACE)] if adds_space else []
        tokenizer.normalizer = normalizers.Sequence([*prepends, normalizers.Replace(" ", SPACE)])
    if adds_space:
        decoder.append(decoders.Strip(" ", left=1))
    tokenizer.decoder = decoders.Sequence(decoder)
    return tokenizer, True


KINDS: dict[str, Callable[[GGUFFile, Metadata, Pieces], tuple[Tokenizer, bool]]] = {
    "gpt2": _byte_level,
    "llama": _sentence_piece,
}
"""What builds each kind of vocabulary: the tokenizer, and whether texts begin with bos where the file does not say."""


def _rstrips(file: GGUFFile) -> bool:
    """Whether special tokens take the white space behind them, as those of Phi-3's chats do; no file says it."""
    return file.architecture == "phi3" and file.metadata.text("tokenizer.ggml.model") == "llama"


def _add_tokens(
    tokenizer: Tokenizer, pieces: Pieces, types: np.ndarray, end_words: Sequence[str], *, rstrips: bool
) -> None:
    """Add the tokens that are found whole in any text: special ones, and those that users defined.

    Words that end answers are special whatever their types. Gemma's runs of spaces are not among them: merges put them
    together as they do all else.
    """
    types = types[: len(pieces.words)]
    ends = [pieces.ids[word] for word in end_words if word in pieces.ids]
    special = dict.fromkeys([*np.flatnonzero((types == UNKNOWN) | (types == CONTROL)).tolist(), *ends])
    defined = dict.fromkeys(np.flatnonzero(types == USER_DEFINED).tolist())
    for ids, is_special in ((special, True), (defined.keys() - special, False)):
        words = [word for index in sorted(ids) if (word := pieces.words[index]).strip(SPACE)]
        tokenizer.add_tokens(
            [
                AddedToken(word, normalized=False, special=is_special, rstrip=rstrips and word not in NEVER_STRIPPING)
                for word in words
            ]
        )


def _word(file: GGUFFile, metadata: Metadata, words: Sequence[str], role: str, *, is_needed: bool) -> str | None:
    """The token of a role, or None if the file names none; one that is not needed may be a number that no token has."""
    key = f"{role}_token_id"
    if key not in metadata:
        return None
    token_id = metadata.integer(key)
    if token_id < len(words):
        return words[token_id]
    problem = f"{file.path}: tokenizer.ggml.{key}: got {token_id}; must be below {len(words)}, the number of tokens"
    if is_needed:
        raise ModelError(f"{problem}; download it again")
    logger.warning("%s; it is left out", problem)
    return None


def _around(tokenizer: Tokenizer, bos: str | None, eos: str | None) -> processors.TemplateProcessing:
    """What puts bos before a text and eos after it."""
    template = [*([bos] if bos else []), "$A", *([eos] if eos else [])]
    named = [(token, tokenizer.token_to_id(token)) for token in dict.fromkeys((bos, eos)) if token]
    return processors.TemplateProcessing(single=template, special_tokens=named)
