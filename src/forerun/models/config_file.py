"""How a model's configuration is read: by our own table where it covers the file, else by transformers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.errors import ModelError
from forerun.models.config import HFConfig
from forerun.models.folder import CONFIG_FILE, GENERATION_FILE, find_gguf, read_json
from forerun.models.plain_config import plain_config
from forerun.models.quiet import one_line, quiet_transformers

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def read_config(path: Path) -> HFConfig:
    """Read and check a model's configuration: a causal language model that we or transformers know.

    `architectures` is filled in where the file leaves it out, as GGUF does.

    Raises:
        ModelError: there is none, it is damaged, or it is of another kind of model.
    """
    if find_gguf(path) is None:
        content = read_json(path / CONFIG_FILE)
        _check_usable(path / CONFIG_FILE, content)
        config = plain_config(content)
        if config is not None:
            return config
    return read_transformers_config(path)


def read_transformers_config(path: Path) -> PretrainedConfig:
    """The same, as transformers' own object.

    Raises:
        ModelError: see `read_config`.
    """
    from transformers import AutoConfig  # here, for it takes 100 MB
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config: PretrainedConfig
    gguf = find_gguf(path)
    if gguf is not None:
        from forerun.models.gguf import read_gguf_config

        config = read_gguf_config(gguf)
    else:
        content = read_json(path / CONFIG_FILE)
        _check_usable(path / CONFIG_FILE, content)
        _check_known(path / CONFIG_FILE, content)
        try:
            with quiet_transformers():
                config = AutoConfig.from_pretrained(path.absolute(), local_files_only=True, trust_remote_code=False)
        except Exception as error:
            raise ModelError(f"{path / CONFIG_FILE}: cannot be used ({one_line(error)}); mend it") from error
    _check_causal(path, config)
    config.architectures = config.architectures or [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    return config


def config_like(model_type: str, architecture: str, values: Mapping[str, Any]) -> HFConfig:
    """The configuration of a model of `architecture` with these values, and the class's where there are none.

    Raises:
        ValueError, TypeError, AttributeError: what transformers says of impossible values.
    """
    plain = plain_config({**values, "model_type": model_type, "architectures": [architecture]})
    if plain is not None:
        return plain
    from transformers import AutoConfig  # here, for it takes 100 MB

    with quiet_transformers():
        config = AutoConfig.for_model(model_type, **values)
    config.architectures = [architecture]
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


def _check_usable(file: Path, content: Mapping[str, Any]) -> None:
    """Refuse what is no model's configuration, and quantized weights."""
    model_type = content.get("model_type")
    if model_type is None:
        raise ModelError(f"{file}: has no model_type; give the folder of a transformers model")
    if not isinstance(model_type, str):
        raise ModelError(f"{file}: model_type: got {model_type!r}; must be a string; mend it")
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


def _check_known(file: Path, content: Mapping[str, Any]) -> None:
    """Refuse what transformers has no class for, and code that comes with the model."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_type = content["model_type"]
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


def _check_causal(path: Path, config: PretrainedConfig) -> None:
    """Refuse models that do not predict the next token from the tokens before it."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if config.is_encoder_decoder:
        raise ModelError(f"{path}: {config.model_type!r} is an encoder-decoder; must be a causal language model")
    causal = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    named = config.architectures or []
    known = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    if causal is None or (named and not known.intersection(named)):
        what = named[0] if named else config.model_type
        raise ModelError(f"{path}: {what} is not a causal language model (...ForCausalLM), so it cannot generate text")
