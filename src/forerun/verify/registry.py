"""The verifiers by name, as `rejection_sample_method` names them."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Protocol

from forerun.verify.base import Verifier
from forerun.verify.block import BlockConfig
from forerun.verify.matching import MatchingConfig
from forerun.verify.rejection import RejectionConfig
from forerun.verify.synthetic import SyntheticConfig
from forerun.verify.typical import ThresholdConfig, TypicalConfig

__all__ = ["VERIFIERS", "VERIFIER_KEYS", "MatchingConfig", "VerifierConfig"]


class VerifierConfig(Protocol):
    """A verifier's own settings: a frozen dataclass whose field names are the user's keys.

    Its `__post_init__` raises `ConfigError` for a value out of range.
    """

    def build(self, num_speculative_tokens: int, /) -> Verifier:
        """Make the verifier for drafts of at most `num_speculative_tokens` nodes."""
        ...


VERIFIERS: dict[str, type[VerifierConfig]] = {
    "matching": MatchingConfig,
    "standard": RejectionConfig,
    "block": BlockConfig,
    "typical": TypicalConfig,
    "threshold": ThresholdConfig,
    "synthetic": SyntheticConfig,
}


def _keys(config_class: Any) -> set[str]:
    return {f.name for f in fields(config_class)}


VERIFIER_KEYS = ("rejection_sample_method", *sorted(set().union(*map(_keys, VERIFIERS.values()))))
"""All keys that choose or set a verifier."""
