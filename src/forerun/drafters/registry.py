"""The drafters that `speculative_config["method"]` can name."""

from __future__ import annotations

from forerun.drafters.base import DrafterConfig
from forerun.drafters.dflash import DFlashConfig
from forerun.drafters.draft_model import DraftModelConfig, PardConfig
from forerun.drafters.eagle import Eagle3Config, EagleConfig, PEagleConfig
from forerun.drafters.extract_hidden_states import ExtractHiddenStatesConfig
from forerun.drafters.hybrid import HybridConfig
from forerun.drafters.medusa import MedusaConfig
from forerun.drafters.mlp_speculator import MLPSpeculatorConfig
from forerun.drafters.mtp import MTPConfig
from forerun.drafters.ngram import NgramConfig
from forerun.drafters.self_draft import SelfConfig
from forerun.drafters.suffix import SuffixConfig

DRAFTERS: dict[str, type[DrafterConfig]] = {
    "ngram": NgramConfig,
    "suffix": SuffixConfig,
    "draft_model": DraftModelConfig,
    "pard": PardConfig,
    "self": SelfConfig,
    "eagle": EagleConfig,
    "eagle3": Eagle3Config,
    "peagle": PEagleConfig,
    "medusa": MedusaConfig,
    "mtp": MTPConfig,
    "mlp_speculator": MLPSpeculatorConfig,
    "dflash": DFlashConfig,
    "hybrid": HybridConfig,
    "extract_hidden_states": ExtractHiddenStatesConfig,
}
"""Method -> its settings, which know how to build the drafter."""
