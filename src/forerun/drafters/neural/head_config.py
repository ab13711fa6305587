"""The keys that the settings of all trained heads have."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.drafters.neural.sampling import DraftSamplingConfig
from forerun.ops.native.formats import check_quantization


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedHeadConfig(DraftSamplingConfig):
    """How tokens are picked (`DraftSampling`), and the format that the head's own matrices are rounded to, or None.

    Raises:
        ConfigError: a value is out of range.
    """

    quantization: str | None = None

    def __post_init__(self) -> None:
        DraftSamplingConfig.__post_init__(self)
        check_quantization(self.quantization, setting="quantization (of the drafter)")
