"""Reads a model's configuration: without transformers where the table of families covers the file, else with it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.core.integers import is_integer
from forerun.errors import ModelError, one_line
from forerun.models.completed_config import config_without_transformers
from forerun.models.config import MEND, HFConfig, check_num_layers
from forerun.models.model_folder import CONFIG_FILE, GENERATION_FILE, QUANTIZATION_KEY, find_gguf, read_json
from forerun.models.quantized import quantized_layout
from forerun.models.transformers_logging import quiet_transformers

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from forerun.models.tokenizer import Tokenizer

MASK_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")
"""Keys of config.json for the mask token; the first that is present counts, as in vLLM."""


def read_config(path: Path) -> HFConfig:
    """Read a model's configuration, and check that it is a causal language model that can be run.

    `architectures` is filled in where the file leaves it out, as GGUF does.

    Raises:
        ModelError: there is none, it is damaged, or it is of another kind of model.
    """
    gguf = find_gguf(path)
    if gguf is not None:
        return _read_gguf_config(gguf)
    content = read_json(path / CONFIG_FILE)
    _check_usable(path / CONFIG_FILE, content)
    config = config_without_transformers(content)
    return read_transformers_config(path) if config is None else config


def _read_gguf_config(path: Path) -> HFConfig:
    """Read the configuration of a model in a GGUF file; transformers reads those that have no row in the table.

    Raises:
        ModelError: the file is damaged, or neither forerun nor transformers knows its architecture.
    """
    from forerun.models.gguf.architectures import architecture_of
    from forerun.models.gguf.config import config_of
    from forerun.models.gguf.file import open_gguf

    file = open_gguf(path)
    row = architecture_of(file)
    if row is not None:
        return config_of(file, row)
    from forerun.models.gguf.with_transformers import read_transformers_gguf_config

    return read_transformers_gguf_config(file)


def read_transformers_config(path: Path) -> PretrainedConfig:
    """Read the configuration with transformers, as its own object.

    Raises:
        ModelError: see `read_config`.
    """
    from transformers import AutoConfig  # here, for it takes 100 MB
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config: PretrainedConfig
    gguf = find_gguf(path)
    if gguf is not None:
        from forerun.models.gguf.file import open_gguf
        from forerun.models.gguf.with_transformers import read_transformers_gguf_config

        config = read_transformers_gguf_config(open_gguf(gguf))
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
    if not set(config.architectures or ()).intersection(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()):
        config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    return config


def config_like(model_type: str, architecture: str, values: Mapping[str, Any]) -> HFConfig:
    """Make the configuration of a model of `architecture` from these values and the class's defaults.

    Raises:
        ModelError: there are more layers than a model has.
        ValueError, TypeError, AttributeError: transformers refuses a value.
    """
    check_num_layers(values)
    stand_in = config_without_transformers({**values, "model_type": model_type, "architectures": [architecture]})
    if stand_in is not None:
        return stand_in
    from transformers import AutoConfig  # here, for it takes 100 MB

    with quiet_transformers():
        config = AutoConfig.for_model(model_type, **values)
    config.architectures = [architecture]
    return config


def eos_token_ids(path: Path, tokenizer: Tokenizer | None = None) -> frozenset[int]:
    """Return the ids that end a text, an empty set if there are none.

    They are eos in generation_config.json, else in the configuration, and as in vLLM that of the tokenizer, since models that were
    trained further often name the end of a turn there alone.
    """
    of_tokenizer = None if tokenizer is None else tokenizer.eos_token_id
    return _model_eos_token_ids(path) | (frozenset() if of_tokenizer is None else {of_tokenizer})


def _model_eos_token_ids(path: Path) -> frozenset[int]:
    """Return the ids that end a text by generation_config.json, or else by the configuration."""
    if find_gguf(path) is None and (path / GENERATION_FILE).exists():
        eos = read_json(path / GENERATION_FILE).get("eos_token_id")
        if eos is not None:
            return _as_ids(eos, path / GENERATION_FILE)
    eos = read_config(path).get_text_config().eos_token_id
    return frozenset() if eos is None else _as_ids(eos, path)


def read_mask_token(content: Mapping[str, Any], *, vocab_size: int) -> int:
    """Read a drafter's mask token (see `MaskToken`) from the content of its config.json.

    Raises:
        ModelError: it names none, or one outside the vocabulary.
    """
    for key in MASK_KEYS:
        token_id = content.get(key)
        if token_id is None:
            continue
        if not is_integer(token_id) or not 0 <= token_id < vocab_size:
            raise ModelError(
                f"config.json of the drafter: {key}: got {token_id!r}; must be a token id from 0 to {vocab_size - 1}; mend it"
            )
        return token_id
    raise ModelError(
        f"config.json of the drafter: has none of {', '.join(MASK_KEYS)}, which parallel drafting needs; use a drafter "
        "that was trained for it, or leave parallel_drafting out"
    )


def _as_ids(eos: Any, source: Path) -> frozenset[int]:
    """Turn one id or a list of them into a set."""
    ids = eos if isinstance(eos, list) else [eos]
    if not all(isinstance(token_id, int) and token_id >= 0 for token_id in ids):
        raise ModelError(f"{source}: eos_token_id: got {eos!r}; must be a token id or a list of them; mend it")
    return frozenset(ids)


def _check_usable(file: Path, content: Mapping[str, Any]) -> None:
    """Refuse a file that is not a model's configuration, and weights in a form that is not supported."""
    model_type = content.get("model_type")
    if model_type is None:
        raise ModelError(f"{file}: has no model_type; give the folder of a transformers model")
    if not isinstance(model_type, str):
        raise ModelError(f"{file}: model_type: got {model_type!r}; must be a string; mend it")
    named = content.get("architectures")
    if named is not None and not (isinstance(named, list) and all(isinstance(name, str) for name in named)):
        raise ModelError(f"{file}: architectures: got {named!r}; must be a list of strings; mend it")
    try:
        check_num_layers(content)
    except ModelError as error:
        raise ModelError(f"{file}: {str(error).removesuffix(MEND)}mend it") from error
    if content.get(QUANTIZATION_KEY):
        _check_quantized(file, content[QUANTIZATION_KEY])


def _check_quantized(file: Path, settings: object) -> None:
    """Refuse weights that are quantized in a way that is not supported."""
    try:
        quantized_layout(settings)
    except ModelError as error:
        raise ModelError(f"{file}: {error}") from error


def _check_known(file: Path, content: Mapping[str, Any]) -> None:
    """Refuse a model that transformers has no class for, and one that comes with code of its own."""
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
    own = f"{config.model_type}forcausallm"  # where transformers computes it as another, as InternLM3 as Llama
    if causal is None or (named and not known.intersection(named) and own not in map(str.lower, named)):
        what = named[0] if named else config.model_type
        raise ModelError(
            f"{path}: {what} is not a causal language model that transformers knows (...ForCausalLM), so it cannot generate text"
        )
