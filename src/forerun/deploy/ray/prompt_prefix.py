"""The beginning of a prompt as chained digests, from the body of a request: what a router knows a prompt by.

A digest names everything of the prompt up to its place, and the request's cache salt, so two prompts share as many
digests as they share whole blocks. Text is not tokenised: a router has no tokenizer, and equal text gives equal tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from forerun.kv.prefix_cache import block_digests, root_digest
from forerun.models.chat.conversation import ATTRIBUTION

TOKENS_PER_BLOCK = 64
BYTES_PER_BLOCK = 256
"""Of text, which count as `TOKENS_PER_BLOCK` tokens: an English token has some four letters."""

MOST_DIGESTS = 512
"""Of a prompt: 32,768 tokens; prompts that are equal so far are told apart by load alone."""

DIGEST_BYTES = 8
"""Of each SHA-256 in the header: a collision sends a request to a replica that has not got its prefix, no more."""


class PromptPrefix:
    """The digests of a prompt's blocks, first to last.

    Args:
        digests: of its whole blocks, or the first of them.
        num_tokens: of the whole prompt, as far as that is known; of text an estimate.
    """

    __slots__ = ("digests", "num_tokens")

    def __init__(self, digests: Sequence[bytes], num_tokens: int) -> None:
        self.digests = tuple(digests)
        self.num_tokens = num_tokens

    def to_header(self) -> bytes:
        """The value of a header that carries it."""
        return b"%d:%s" % (self.num_tokens, b"".join(self.digests).hex().encode())

    @classmethod
    def from_header(cls, value: bytes) -> PromptPrefix:
        """Read what `to_header` wrote.

        Raises:
            ValueError: it is of another form.
        """
        count, digits = value.decode("ascii").split(":")
        joined, num_tokens = bytes.fromhex(digits), int(count)
        if len(joined) % DIGEST_BYTES or num_tokens < 0:
            raise ValueError(f"prompt prefix: got {len(joined)} bytes of digests for {num_tokens} tokens")
        return cls([joined[at : at + DIGEST_BYTES] for at in range(0, len(joined), DIGEST_BYTES)], num_tokens)


def prefix_of_body(body: bytes) -> PromptPrefix | None:
    """The prefix of the prompt in a request for a completion or an answer to a conversation; None where there is none to be read.

    Of several prompts in one request the first counts. A body that is not valid is left to the server to refuse.
    """
    try:
        return _prefix_of(json.loads(body))
    except (ValueError, RecursionError):  # no JSON, or nested deeper than it can be read, or written again
        return None


def _prefix_of(fields: Any) -> PromptPrefix | None:
    if not isinstance(fields, dict):
        return None
    salt = fields.get("cache_salt")
    root = root_digest(salt if isinstance(salt, str) else None)
    for said in (fields.get("messages"), fields.get("input")):
        if isinstance(said, list):
            return _of_text(root, _conversation(said, fields))
        if isinstance(said, str):  # of a user, to Responses
            return _of_text(root, _conversation([{"role": "user", "content": said}], fields))
    match fields.get("prompt"):
        case str(text) | [str(text), *_]:
            return _of_text(root, text.encode("utf-8", "surrogatepass"))
        case [int(), *_] as token_ids:
            return _of_tokens(root, token_ids)
        case [[int(), *_] as token_ids, *_]:
            return _of_tokens(root, token_ids)
    return None


def _of_text(root: bytes, text: bytes) -> PromptPrefix:
    digests = islice(block_digests(root, text, block_size=BYTES_PER_BLOCK), MOST_DIGESTS)
    num_tokens = len(text) * TOKENS_PER_BLOCK // BYTES_PER_BLOCK
    return PromptPrefix([digest[:DIGEST_BYTES] for digest in digests], num_tokens)


def _of_tokens(root: bytes, token_ids: Sequence[Any]) -> PromptPrefix | None:
    if not all(isinstance(one, int) and 0 <= one < 2**31 for one in token_ids):
        return None
    digests = islice(block_digests(root, token_ids, block_size=TOKENS_PER_BLOCK), MOST_DIGESTS)
    return PromptPrefix([digest[:DIGEST_BYTES] for digest in digests], len(token_ids))


def _conversation(messages: Sequence[Any], fields: Mapping[str, Any]) -> bytes:
    """A conversation as text that goes on where its next turn is added; what templates write first comes first."""
    before = {name: fields[name] for name in ("tools", "chat_template_kwargs", "instructions") if fields.get(name)}
    if system := _system_text(fields.get("system")):
        before["system"] = system
    return "\n".join(json.dumps(part, sort_keys=True) for part in (before, *messages)).encode()


def _system_text(system: Any) -> str:
    """What Anthropic's messages have beside them, without its line that changes with each request."""
    parts = system if isinstance(system, list) else [{"text": system}]
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    return "\n".join(ATTRIBUTION.sub("", text) for text in texts if isinstance(text, str))
