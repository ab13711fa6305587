"""The length of a copied draft: the chance that a copied token is accepted, from the length of its match.

Absolute discounting (Ney, Essen and Kneser, 1994): if c of n occurrences of the last m tokens went on
with a token, its chance is not c / n but (c - d) / n, and the discount d falls as the match grows. So a
draft is short after a short match and longer after a longer one. Nothing is timed: the same text gets
the same drafts in every run.
"""

from __future__ import annotations

from forerun.core.finite_numbers import is_number
from forerun.errors import ConfigError

DEFAULT_THRESHOLD = 0.25
"""A good value where a drafted row costs up to a tenth of a pass (docs/drafters/ngram.md has measurements)."""


def discount(match_length: int) -> float:
    """The discount (0 to 1) on a count after a match of `match_length` tokens, 1 or more.

    Fitted to answers of a small model: code edits, chat, summaries, translations and others agree
    (`forerun bench replay`). After one token seen once 0.71, after four 0.26, after 16 0.07.
    """
    return 1.0 / (0.8 * match_length + 0.6)


def confident_length(match_length: int, *, threshold: float, most: int) -> int:
    """The number of tokens (at most `most`) to copy after a match seen once, all accepted with chance `threshold` or more."""
    confidence = 1.0
    for num_tokens in range(most):
        confidence *= 1.0 - discount(match_length + num_tokens)
        if confidence < threshold:
            return num_tokens
    return most


def check_threshold(
    value: float, *, default: float = DEFAULT_THRESHOLD, drafted_at_zero: str = "after any match"
) -> None:
    """Raise `ConfigError` unless `value` may be a `draft_confidence_threshold`; the error names the drafter's `default`."""
    if not is_number(value) or not 0.0 <= value <= 1.0:
        raise ConfigError(
            f"draft_confidence_threshold: got {value!r}; must be a number from 0 to 1; "
            f"0 drafts {drafted_at_zero}, leave it out for {default}"
        )
