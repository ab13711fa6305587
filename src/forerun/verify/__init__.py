"""Verification: which part of a draft stands, by the verifiers that `rejection_sample_method` names."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from forerun.verify.base import VerifierConfig
from forerun.verify.block import BlockConfig
from forerun.verify.matching import MatchingConfig
from forerun.verify.rejection import RejectionConfig
from forerun.verify.synthetic import SyntheticConfig
from forerun.verify.typical import ThresholdConfig, TypicalConfig

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
