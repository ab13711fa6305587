"""Logprobs in the forms of OpenAI's two endpoints; the numbers are the target's own, drafts or not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from forerun.core.outputs import Logprob, TokenLogprobs

LEAST = -9999.0  # what vLLM writes for -inf, which JSON has no number for

Spell = Callable[[int, str], bytes]
"""The bytes of a token, given its id and its text (which is U+FFFD for part of a character)."""


def _number(entry: Logprob) -> float:
    return max(entry.logprob, LEAST)


def _text(entry: Logprob, token_id: int) -> str:
    return f"token_id:{token_id}" if entry.decoded_token is None else entry.decoded_token


def completion_logprobs(
    token_ids: Sequence[int],
    rows: Sequence[TokenLogprobs | None],
    *,
    offset: int,
    token_text: Callable[[int], str],
) -> dict[str, Any]:
    """Of /v1/completions: parallel lists; a row that is None is the prompt's first token, which follows nothing.

    Args:
        token_ids: the tokens that were taken.
        rows: the logprobs at each of them.
        offset: characters of the choice's text before the first of them.
        token_text: gives the text of a token without a row.
    """
    tokens, chosen, tops, offsets = [], [], [], []
    for token_id, row in zip(token_ids, rows, strict=True):
        text = token_text(token_id) if row is None else _text(row[token_id], token_id)
        tokens.append(text)
        chosen.append(None if row is None else _number(row[token_id]))
        tops.append(None if row is None else _by_text(row))
        offsets.append(offset)
        offset += len(text)
    return {"tokens": tokens, "token_logprobs": chosen, "top_logprobs": tops, "text_offset": offsets}


def _by_text(row: TokenLogprobs) -> dict[str, float]:
    """Text -> logprob; of tokens with the same text (parts of characters) the likeliest counts."""
    found: dict[str, float] = {}
    for token_id, entry in row.items():
        text = _text(entry, token_id)
        found[text] = max(_number(entry), found.get(text, LEAST))
    return found


def chat_logprobs(
    token_ids: Sequence[int], rows: Sequence[TokenLogprobs], *, num_top: int, spell: Spell
) -> dict[str, Any]:
    """Of /v1/chat/completions: an entry per token, each with its bytes and the `num_top` likeliest tokens."""

    def entry(token_id: int, logprob: Logprob) -> dict[str, Any]:
        text = _text(logprob, token_id)
        return {"token": text, "logprob": _number(logprob), "bytes": list(spell(token_id, text))}

    content = []
    for token_id, row in zip(token_ids, rows, strict=True):
        likeliest = sorted(row.items(), key=lambda item: item[1].rank or 0)[:num_top]
        tops = [entry(some_id, logprob) for some_id, logprob in likeliest]
        content.append(entry(token_id, row[token_id]) | {"top_logprobs": tops})
    return {"content": content, "refusal": None}
