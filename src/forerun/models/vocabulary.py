"""What the tokens of a tokenizer spell, in bytes, so that tokens of two tokenizers can be compared."""

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
    """A tokenizer's tokens by what they are for: spelling text, or marking it.

    `spellings` are the bytes of each token that spells text; `text_ids` the token to take for given
    bytes: the lowest id, one that stands for a single byte (SentencePiece's "<0x41>") only where
    there is no other, as encoding takes it. `marks` are the added tokens by content ("<|im_end|>");
    those of them that are text as well ("<think>" in some) are in both. `ends` and `begins` are the
    tokens that end and begin a text, `unknown` the one for what cannot be spelled, if there are such.
    """

    spellings: Mapping[int, bytes]
    text_ids: Mapping[bytes, int]
    marks: Mapping[str, int]
    ends: int | None
    begins: int | None
    unknown: int | None

    def ending_of(self, spelling: bytes) -> int | None:
        """The token of the longest ending of `spelling` that has one."""
        endings = (spelling[start:] for start in range(len(spelling)))
        return next((self.text_ids[ending] for ending in endings if ending in self.text_ids), None)


def read_vocabulary(
    tokenizer: Any, *, vocab_size: int, ends: int | None, begins: int | None, unknown: int | None
) -> Vocabulary:
    """Read the tokens of a `tokenizers.Tokenizer`; its decoder says in which notation they are written.

    Ids from `vocab_size` on, which the model has no logits for, are left out.

    Raises:
        ModelError: tokens are written in a notation that is not known.
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
    """The first token in `order` of each spelling."""
    chosen: dict[bytes, int] = {}
    for token_id in order:
        chosen.setdefault(spellings[token_id], token_id)
    return chosen


def _notation(tokenizer: Any) -> tuple[Callable[[str], bytes], Mapping[str, bytes]]:
    """How a token's string says what it spells, and the strings that stand for one byte each."""
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


def _decoder_steps(tokenizer: Any) -> list[dict[str, Any]]:
    """The decoder's parts, as tokenizer.json describes them."""
    if tokenizer.decoder is None:
        return []
    described: dict[str, Any] = json.loads(tokenizer.decoder.__getstate__())
    steps: list[dict[str, Any]] = described.get("decoders", [described])
    return steps


def _replacement(step: Mapping[str, Any]) -> tuple[str, str] | None:
    """What a decoder step replaces by what, if that is what it does: SentencePiece's "▁" by a space."""
    if step["type"] == "Metaspace":
        return step["replacement"], " "
    if step["type"] == "Replace" and "String" in step["pattern"]:
        return step["pattern"]["String"], step["content"]
    return None


def _byte_alphabet() -> dict[str, int]:
    """The character that byte-level BPE (GPT-2) writes for each byte: printable ones as they are, others from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


BYTE_OF = _byte_alphabet()


def _byte_level(word: str) -> bytes:
    """One byte per character; a word with a character outside the alphabet stands for itself."""
    try:
        return bytes([BYTE_OF[character] for character in word])
    except KeyError:
        return word.encode()
