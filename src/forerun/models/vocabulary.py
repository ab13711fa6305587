"""The bytes that each token of a tokenizer spells, by which tokens of two tokenizers can be compared."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from forerun.errors import ModelError

NEUTRAL_STEPS = ("Fuse", "Strip")  # decoder steps that change what tokens spell together, not alone
BYTE_TOKENS = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """A tokenizer's tokens: those that spell text, and added tokens, which mark it.

    Attributes:
        spellings: the bytes of each token that spells text.
        text_ids: the token for given bytes, as encoding chooses it: the lowest id, and a token for a
            single byte (SentencePiece's "<0x41>") only if there is no other.
        marks: added tokens by content ("<|im_end|>"); those that are text too ("<think>" in some
            models) are also in `spellings`.
        ends: the token that ends a text, or None.
        begins: the token that begins a text, or None.
        unknown: the token for what cannot be spelled, or None.
    """

    spellings: Mapping[int, bytes]
    text_ids: Mapping[bytes, int]
    marks: Mapping[str, int]
    ends: int | None
    begins: int | None
    unknown: int | None

    def ending_of(self, spelling: bytes) -> int | None:
        """Return the token of the longest ending of `spelling` that has a token."""
        endings = (spelling[start:] for start in range(len(spelling)))
        return next((self.text_ids[ending] for ending in endings if ending in self.text_ids), None)


def read_vocabulary(
    tokenizer: Any, *, vocab_size: int, ends: int | None, begins: int | None, unknown: int | None
) -> Vocabulary:
    """Read the tokens of a `tokenizers.Tokenizer`, whose decoder defines the notation they are written in.

    Ids from `vocab_size` on, for which the model has no logits, are left out.

    Raises:
        ModelError: the notation is not known.
    """

    def known(token_id: int | None) -> int | None:
        return token_id if token_id is not None and token_id < vocab_size else None

    added = {i: token for i, token in tokenizer.get_added_tokens_decoder().items() if i < vocab_size}
    words = {i: word for word, i in tokenizer.get_vocab(with_added_tokens=False).items() if i < vocab_size}
    spell, byte_tokens = _notation(tokenizer)
    special = {i for i, token in added.items() if token.special}
    words |= {i: token.content for i, token in added.items()}
    spellings = {i: spell(word) for i, word in words.items() if i not in special}
    last_choice = {i for i, word in words.items() if word in byte_tokens}
    return Vocabulary(
        spellings=spellings,
        text_ids=_first_of_each(spellings, sorted(spellings, key=lambda i: (i in last_choice, i))),
        marks={token.content: i for i, token in added.items()},
        ends=known(ends),
        begins=known(begins),
        unknown=known(unknown),
    )


def _first_of_each(spellings: Mapping[int, bytes], order: Iterable[int]) -> dict[bytes, int]:
    """Return the first token in `order` of each spelling."""
    chosen: dict[bytes, int] = {}
    for token_id in order:
        chosen.setdefault(spellings[token_id], token_id)
    return chosen


def _notation(tokenizer: Any) -> tuple[Callable[[str], bytes], Mapping[str, bytes]]:
    """Return the function from a token's string to its bytes, and the strings that stand for one byte each."""
    steps = _decoder_steps(tokenizer)
    kinds = [step["type"] for step in steps]
    if "ByteLevel" in kinds and {"ByteLevel", *NEUTRAL_STEPS}.issuperset(kinds):
        return _byte_level, {}
    replaced = [pair for step in steps if (pair := _replacement(step)) is not None]
    num_known = len(replaced) + sum(kind in ("ByteFallback", *NEUTRAL_STEPS) for kind in kinds)
    if not replaced or num_known < len(steps):
        raise ModelError(
            f"tokenizer: its tokens are written for the decoder {'+'.join(kinds) or 'none'}; "
            "must be byte-level or SentencePiece's to be compared with another's; use a draft model of the target's family"
        )
    byte_tokens = BYTE_TOKENS if "ByteFallback" in kinds else {}

    def spell(word: str) -> bytes:
        if word in byte_tokens:
            return byte_tokens[word]
        for old, new in replaced:
            word = word.replace(old, new)
        return word.encode()

    return spell, byte_tokens


def is_byte_level(tokenizer: Any) -> bool:
    """Return whether a `tokenizers.Tokenizer` decodes by putting the bytes of its tokens side by side, and no more."""
    kinds = {step["type"] for step in _decoder_steps(tokenizer)}
    return "ByteLevel" in kinds and kinds <= {"ByteLevel", "Fuse"}


def _decoder_steps(tokenizer: Any) -> list[dict[str, Any]]:
    """Return the decoder's steps, as in tokenizer.json."""
    if tokenizer.decoder is None:
        return []
    described: dict[str, Any] = json.loads(tokenizer.decoder.__getstate__())
    steps: list[dict[str, Any]] = described.get("decoders", [described])
    return steps


def _replacement(step: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return what a decoder step replaces by what (SentencePiece's "▁" by a space), or None if it does not replace."""
    if step["type"] == "Metaspace":
        return step["replacement"], " "
    if step["type"] == "Replace" and "String" in step["pattern"]:
        return step["pattern"]["String"], step["content"]
    return None


def _byte_alphabet() -> dict[str, int]:
    """Map the characters of byte-level BPE (GPT-2) to bytes: printable characters stand for themselves, others begin at U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


BYTE_OF = _byte_alphabet()


def _byte_level(word: str) -> bytes:
    """Return one byte per character, or a word with a character outside the alphabet as it is."""
    try:
        return bytes([BYTE_OF[character] for character in word])
    except KeyError:
        return word.encode()
