"""Loads a target model: a table row's decoder where there is one, else transformers' own code."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from forerun.errors import ModelError
from forerun.models.base import TargetModel
from forerun.models.checkpoint import open_checkpoint
from forerun.models.decoder import build_decoder
from forerun.models.dummy import DummyCheckpoint
from forerun.models.families import supports
from forerun.models.gguf import find_gguf, read_gguf_config
from forerun.models.packing import Packing
from forerun.models.quiet import one_line, quiet_transformers
from forerun.models.weights import Checkpoint

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"


def load_dummy(
    path: Path, *, dtype: torch.dtype | None, device: torch.device, packing: Packing | None = None
) -> TargetModel:
    """Give a model's configuration seeded random weights; its weight files, if any, are not looked at.

    Args:
        path: the folder or .gguf file.
        dtype: of weights, activations and KV; None: the configuration's, bfloat16 where it names none.
        device: where it computes.
        packing: hands the weights to the native kernels; None: torch computes.

    Raises:
        ModelError: path, configuration or architecture cannot be used.
    """
    config = read_config(path)
    named = config.dtype if isinstance(config.dtype, torch.dtype) else torch.bfloat16
    checkpoint = DummyCheckpoint(config, dtype=dtype or named)
    return build_decoder(config, checkpoint, dtype=dtype or named, device=device, packing=packing)


def load_model(
    path: Path, *, dtype: torch.dtype | None, device: torch.device, packing: Packing | None = None
) -> TargetModel:
    """Load the model in a Hugging Face folder or a .gguf file.

    Args:
        path: the folder or file.
        dtype: of weights, activations and KV; None: as in the checkpoint.
        device: where it computes.
        packing: hands the weights to the native kernels; None: torch computes.

    Raises:
        ModelError: path, configuration, weights or architecture cannot be used.
    """
    config = read_config(path)
    if not supports(config):
        from forerun.models.fallback import load_fallback  # here, for it takes 120 MB of transformers' own code

        return load_fallback(path, config, dtype=dtype, device=device, packing=packing)
    checkpoint = open_checkpoint(path)
    dtype = dtype or _stored_dtype(config, checkpoint)
    return build_decoder(config, checkpoint, dtype=dtype, device=device, packing=packing)


def read_config(path: Path) -> PretrainedConfig:
    """Read and check a model's configuration: a causal language model that transformers knows.

    `architectures` is filled in where the file leaves it out, as GGUF does.

    Raises:
        ModelError: there is none, it is damaged, or it is of another kind of model.
    """
    gguf = find_gguf(path)
    if gguf is not None:
        config = read_gguf_config(gguf)
    else:
        _check_known(path, read_json(path / CONFIG_FILE))
        try:
            with quiet_transformers():
                config = AutoConfig.from_pretrained(path.absolute(), local_files_only=True, trust_remote_code=False)
        except Exception as error:
            raise ModelError(f"{path / CONFIG_FILE}: cannot be used ({one_line(error)}); mend it") from error
    _check_causal(path, config)
    config.architectures = config.architectures or [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    return config


def eos_token_ids(path: Path) -> frozenset[int]:
    """Ids that end a text: eos in generation_config.json, else in the configuration; empty if neither has one."""
    if find_gguf(path) is None and (path / GENERATION_FILE).exists():
        eos = read_json(path / GENERATION_FILE).get("eos_token_id")
        if eos is not None:
            return _as_ids(eos, path / GENERATION_FILE)
    eos = read_config(path).get_text_config().eos_token_id
    return frozenset() if eos is None else _as_ids(eos, path)


def _as_ids(eos: Any, source: Path) -> frozenset[int]:
    """One id or a list of them."""
    ids = eos if isinstance(eos, list) else [eos]
    if not all(isinstance(token_id, int) and token_id >= 0 for token_id in ids):
        raise ModelError(f"{source}: eos_token_id: got {eos!r}; must be a token id or a list of them; mend it")
    return frozenset(ids)


def read_json(file: Path) -> Mapping[str, Any]:
    """Read a JSON object from a model folder."""
    if not file.parent.is_dir():
        raise ModelError(f"{file.parent}: there is no such folder; check the path")
    if not file.is_file():
        raise ModelError(f"{file.parent}: not a model folder (no {file.name}); give the folder that holds it")
    try:
        content = json.loads(file.read_bytes())
    except ValueError as error:
        raise ModelError(f"{file}: not JSON ({one_line(error)}); download it again") from error
    if not isinstance(content, dict):
        raise ModelError(f"{file}: got a {type(content).__name__}; must be a JSON object; download it again")
    return content


def _check_known(path: Path, content: Mapping[str, Any]) -> None:
    """Refuse what transformers has no class for, code that comes with the model, and quantized weights."""
    file = path / CONFIG_FILE
    model_type = content.get("model_type")
    if model_type is None:
        raise ModelError(f"{file}: has no model_type; give the folder of a transformers model")
    if not isinstance(model_type, str):
        raise ModelError(f"{file}: model_type: got {model_type!r}; must be a string; mend it")
    if model_type not in CONFIG_MAPPING:
        if content.get("auto_map"):
            raise ModelError(
                f"{file}: architecture {model_type!r} brings its own code (trust_remote_code), which is never run; "
                "use a version of the model that transformers has built in"
            )
        raise ModelError(
            f"{file}: architecture {model_type!r} is unknown to the installed transformers; "
            "upgrade transformers or use another model"
        )
    named = content.get("architectures")
    if named is not None and not (isinstance(named, list) and all(isinstance(name, str) for name in named)):
        raise ModelError(f"{file}: architectures: got {named!r}; must be a list of strings; mend it")
    quantization = content.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise ModelError(
            f"{file}: the weights are quantized ({method}); must be plain safetensors or GGUF; "
            "use the original model or a GGUF of it"
        )


def _check_causal(path: Path, config: PretrainedConfig) -> None:
    """Refuse models that do not predict the next token from the tokens before it."""
    if config.is_encoder_decoder:
        raise ModelError(f"{path}: {config.model_type!r} is an encoder-decoder; must be a causal language model")
    causal = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    named = config.architectures or []
    known = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    if causal is None or (named and not known.intersection(named)):
        what = named[0] if named else config.model_type
        raise ModelError(f"{path}: {what} is not a causal language model (...ForCausalLM), so it cannot generate text")


def _stored_dtype(config: PretrainedConfig, checkpoint: Checkpoint) -> torch.dtype:
    """The dtype that the configuration names, else the one of the weights."""
    if isinstance(config.dtype, torch.dtype):
        return config.dtype
    return checkpoint.load(min(checkpoint.names())).dtype
