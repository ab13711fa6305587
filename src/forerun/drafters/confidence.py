"""How far to bet on a text that seems to come back: the chance that a copied token stands.

Absolute discounting (Ney, Essen and Kneser, 1994): of n times that the last m tokens occurred, c went
on with a token; its chance is not c / n but (c - d) / n, and the discount d falls as the match grows.
So a bet is short after a short match and grows with each token that came true, on the text's evidence
alone; nothing is timed, so the same text is drafted alike in every run.
"""

from __future__ import annotations

from forerun.errors import ConfigError

DEFAULT_THRESHOLD = 0.25
"""Loses nothing where a drafted row costs up to a tenth of a pass (see the log of experiments)."""


def discount(match_length: int) -> float:
    """What to take from a count after a match of `match_length` tokens, 1 or more; from 0 to 1.

    Fitted to answers of a small model: code edits, chat, summaries, translations and others agree
    (`benchmarks/draft_rules.py`). After one token seen once 0.71, after four 0.26, after 16 0.07.
    """
    return 1.0 / (0.8 * match_length + 0.6)


def confident_length(match_length: int, *, threshold: float, most: int) -> int:
    """How many tokens (at most `most`) to copy after a match seen once: all stand with chance `threshold` or more."""
    confidence = 1.0
    for num_tokens in range(most):
        confidence *= 1.0 - discount(match_length + num_tokens)
        if confidence < threshold:
            return num_tokens
    return most


def check_threshold(value: float) -> None:
    """Raise `ConfigError` unless `value` may be a `draft_confidence_threshold`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 <= value <= 1.0:
        raise ConfigError(
            f"draft_confidence_threshold: got {value!r}; must be a number from 0 to 1; "
            f"0 bets whatever the match, leave it out for {DEFAULT_THRESHOLD}"
        )
