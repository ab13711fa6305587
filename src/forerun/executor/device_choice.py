"""Whether a step is computed on the device, and which layers are: what `device_step` and a target allow."""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import replace

from forerun.errors import ConfigError
from forerun.models.base import LoadedTarget
from forerun.models.decoder import Decoder
from forerun.models.on_device import DeviceParts, obstacle
from forerun.ops.cuda.functions import LayerFunctions
from forerun.verify.base import VerifierConfig
from forerun.verify.matching import MatchingConfig

logger = logging.getLogger(__name__)


def steps_on_device(asked: bool | None, target: LoadedTarget, verifier: VerifierConfig) -> bool:
    """Whether a `DeviceExecutor` computes the steps: as asked, or where None was, on a GPU whose kernels compute all of it."""
    if asked is not None:
        return asked
    if target.model.device.type != "cuda":
        return False
    reason = _reason_against(target, verifier)
    if reason is not None:
        logger.info("torch computes the steps, not forerun's kernels for GPUs: %s", reason)
    return reason is None


def _reason_against(target: LoadedTarget, verifier: VerifierConfig) -> str | None:
    if target.ranks is not None:
        return "several processes compute the target"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (pip install 'forerun[cuda]')"
    if not isinstance(verifier, MatchingConfig):
        return "they verify by matching alone"
    return None if target.on_device is not None else obstacle(target.model)


def with_layers_on_device(target: LoadedTarget, *, max_length: int, matmul: str = "kernels") -> LoadedTarget:
    """The target with layers and attention by `ops.cuda`, or as it is where they cannot compute it.

    Args:
        target: its weights are shared.
        max_length: tokens of the longest text.
        matmul: see `LayerFunctions.choose`.

    Raises:
        ConfigError: it is on a GPU, and triton is not installed; or the layers cannot be computed by `ops.cuda`, and `matmul`
            says how.
    """
    if target.on_device is not None:
        return target
    functions = LayerFunctions.choose(target.model.device, matmul=matmul)
    reason = obstacle(target.model)
    if reason is not None:
        if matmul != "kernels":
            raise ConfigError(
                f"device_matmul: got {matmul!r}, but its layers are computed otherwise: {reason}; leave it out"
            )
        logger.info("device_step: the model's layers are computed as without it, since %s", reason)
        return target
    model = target.model
    assert isinstance(model, Decoder), "there is no obstacle"
    logger.info(
        "device_step: layers and attention are computed by %s%s",
        "Triton kernels" if functions.are_kernels else "formulas in torch, row by row, which is slow",
        "" if functions.are_batch_invariant else "; products by torch: drafts may change texts at near-ties",
    )
    parts = DeviceParts(functions, max_length)
    return replace(target, model=parts.decoder(model), attention=parts.attention(), on_device=parts)
