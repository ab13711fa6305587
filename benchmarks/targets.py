"""Makes an LLM of a target that no option of the engine describes."""

from __future__ import annotations

from forerun import LLM
from forerun.config.settings import EngineSettings
from forerun.config.speculative_config import resolve_speculative
from forerun.models.base import LoadedTarget, TargetModel, choose_attention
from forerun.models.config_file import eos_token_ids
from forerun.models.store import resolve_model
from forerun.models.tokenizer import load_tokenizer
from forerun.models.tokenizer_files import has_tokenizer
from forerun.ops.native.library import Kernels


def llm_on(model: TargetModel, settings: EngineSettings, kernels: Kernels | None) -> LLM:
    """Make an engine around `model`, built from `settings.model` and packed for `kernels`, or for torch if that is None."""
    path = resolve_model(settings.model)
    target = LoadedTarget(
        model=model,
        attention=choose_attention(model.kv_specs, kernels),
        tokenizer=load_tokenizer(path) if has_tokenizer(path) else None,
        eos_token_ids=eos_token_ids(path),
        path=path,
        kernels=kernels,
    )
    return LLM.from_target(target, settings, resolve_speculative(None))
