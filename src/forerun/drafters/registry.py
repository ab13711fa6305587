"""The drafters that `speculative_config["method"]` can name."""

from __future__ import annotations

from forerun.drafters.base import DrafterConfig
from forerun.drafters.draft_model import DraftModelConfig
from forerun.drafters.eagle import Eagle3Config, EagleConfig
from forerun.drafters.hybrid import HybridConfig
from forerun.drafters.medusa import MedusaConfig
from forerun.drafters.mlp_speculator import MLPSpeculatorConfig
from forerun.drafters.ngram import NgramConfig
from forerun.drafters.self_draft import SelfConfig
from forerun.drafters.suffix import SuffixConfig

DRAFTERS: dict[str, type[DrafterConfig]] = {
    "ngram": NgramConfig,
    "suffix": SuffixConfig,
    "draft_model": DraftModelConfig,
    "self": SelfConfig,
    "eagle": EagleConfig,
    "eagle3": Eagle3Config,
    "medusa": MedusaConfig,
    "mlp_speculator": MLPSpeculatorConfig,
    "hybrid": HybridConfig,
}
"""Method -> its settings, which know how to build the drafter."""
