"""The configuration of a model in a GGUF file, from the file's metadata: the same object that config.json becomes."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import torch

from forerun.errors import ModelError, one_line
from forerun.models.config import HFConfig, NotCoveredError
from forerun.models.config_file import ConfigStandIn, completed
from forerun.models.families import MODEL_TYPES
from forerun.models.gguf.architectures import (
    EMBEDDING,
    HEAD,
    LAYER_TENSOR,
    ROPE_FACTORS,
    Fields,
    GGUFArchitecture,
    architecture_of,
)
from forerun.models.gguf.file import GGUFFile, open_gguf
from forerun.models.gguf.metadata import Metadata
from forerun.models.gguf.tensors import load_tensor
from forerun.ops.block_formats import BLOCK_FORMATS

TOKENS = "tokenizer.ggml.tokens"
END_KEYS = ("eos", "eot", "eom")  # of a text, of a turn, of a message that calls tools
END_TOKENS = (
    *("<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>"),
    *("<|end_of_turn|>", "<EOT>", "< EOT >", "_<EOT>"),
)
"""Tokens that end an answer in whichever vocabulary they are, as in llama.cpp: files often name one end of several."""


def read_gguf_config(path: Path) -> HFConfig:
    """Read the configuration of a model in a GGUF file; transformers reads those that have no row in the table.

    Raises:
        ModelError: the file is damaged, or neither forerun nor transformers knows its architecture.
    """
    file = open_gguf(path)
    row = architecture_of(file)
    if row is not None:
        return config_of(file, row)
    from forerun.models.gguf.with_transformers import read_transformers_gguf_config

    return read_transformers_gguf_config(file)


def config_of(file: GGUFFile, row: GGUFArchitecture) -> ConfigStandIn:
    """Make the configuration that the decoder resolves.

    Raises:
        ModelError: metadata are missing or contradict each other, or the decoder has no code for what they ask for.
    """
    own = file.own
    if own.integer("expert_count", 0):
        raise NotCoveredError(
            f"{file.path} ({file.describe()}): architecture {row.name!r} with {own.integer('expert_count')} experts is not "
            "supported; use a model without experts"
        )
    family = MODEL_TYPES[row.model_type]
    try:
        fields = _sizes(file) | _tokens(file) | row.fields(file)
        if "attention.sliding_window" in own and "sliding_window" not in fields:
            raise NotCoveredError(f"{file.path}: architecture {row.name!r} with a sliding window is not supported")
        config = completed({**fields, "model_type": row.model_type}, family)
    except (ArithmeticError, TypeError, ValueError) as error:
        raise ModelError(
            f"{file.path}: its metadata cannot be used ({one_line(error)}); convert the original model again"
        ) from error
    rope = _rope(file)
    has_two = row.model_type == "gemma3_text"
    config.rope_parameters = {"full_attention": rope, "sliding_attention": _local_rope(own)} if has_two else rope
    return config


def _sizes(file: GGUFFile) -> Fields:
    """What all families name alike."""
    own = file.own
    if EMBEDDING not in file.tensors:
        raise ModelError(f"{file.path} ({file.describe()}): tensor {EMBEDDING!r} is missing; download it again")
    heads = _at_least_one(own, "attention.head_count")
    hidden_size = _at_least_one(own, "embedding_length")
    head_dim = own.integer("attention.key_length", hidden_size // heads)
    if head_dim % 2 or not head_dim:
        raise ModelError(
            f"{file.path}: heads have {head_dim} dimensions; must be pairs; convert the original model again"
        )
    if own.integer("attention.value_length", head_dim) != head_dim:
        raise NotCoveredError(f"{file.path}: heads of keys and of values have different sizes, which is not supported")
    layers = {found["layer"] for name in file.tensors if (found := LAYER_TENSOR.fullmatch(name))}
    if own.integer("block_count") != len(layers):
        raise ModelError(
            f"{file.path} ({file.describe()}): has tensors of {len(layers)} layers, but must have "
            f"{own.integer('block_count')}; download it again, with all its parts"
        )
    return {
        "vocab_size": file.tensors[EMBEDDING].shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": own.integer("feed_forward_length"),
        "num_hidden_layers": own.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": own.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": own.integer("context_length"),
        "rms_norm_eps": own.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": HEAD not in file.tensors,
        "dtype": _float_type(file),
    }


def _at_least_one(own: Metadata, key: str) -> int:
    found = own.integer(key)
    if not found:
        raise ModelError(f"{own.file}: metadata {key}: got 0; must be 1 or more; convert the original model again")
    return found


def _float_type(file: GGUFFile) -> torch.dtype:
    """The float type of the matrices; bf16 where some are in blocks, of which the kernels take rows in bf16."""
    types = {place.type.name for place in file.tensors.values() if len(place.shape) > 1}
    if types == {"BF16"} or types & BLOCK_FORMATS.keys():
        return torch.bfloat16
    return torch.float16 if types == {"F16"} else torch.float32


def _tokens(file: GGUFFile) -> Fields:
    """The tokens that begin, end and fill texts."""
    known = file.metadata.below("tokenizer.ggml")
    ends = [known.integer(f"{key}_token_id") for key in END_KEYS if f"{key}_token_id" in known]
    if TOKENS in file.metadata:
        if file.metadata.count(TOKENS) > file.tensors[EMBEDDING].shape[0]:
            raise ModelError(
                f"{file.path}: has {file.metadata.count(TOKENS)} tokens, but embeddings of only "
                f"{file.tensors[EMBEDDING].shape[0]}; convert the original model again"
            )
        ends += _end_tokens(file)
    names = {"bos_token_id": "bos_token_id", "pad_token_id": "padding_token_id"}
    others = {field: known.integer(key) for field, key in names.items() if key in known}
    return {"eos_token_id": list(dict.fromkeys(ends)) or None, **others}


@lru_cache(maxsize=2)
def _end_tokens(file: GGUFFile) -> tuple[int, ...]:
    """The tokens of the vocabulary that end an answer. A start asks for the configuration several times, a search takes 20 ms."""
    return tuple(file.metadata.places(TOKENS, END_TOKENS).values())


def _rope(file: GGUFFile) -> Fields:
    """The rotary embedding of all layers, or of those without a window."""
    own = file.own
    parameters: Fields = {"rope_type": "default", "rope_theta": own.number("rope.freq_base", 10_000.0)}
    head_dim = own.integer(
        "attention.key_length", own.integer("embedding_length") // own.integer("attention.head_count")
    )
    turned = own.integer("rope.dimension_count", head_dim)
    if turned != head_dim:
        parameters["partial_rotary_factor"] = turned / head_dim
    kind = own.text("rope.scaling.type", "none")
    if ROPE_FACTORS in file.tensors:
        parameters |= {"rope_type": "factors", "factors": _factors(file)}
    elif kind in ("linear", "yarn"):
        parameters |= {"rope_type": kind, "factor": own.number("rope.scaling.factor")}
        if kind == "yarn":
            parameters |= _yarn(own)
    elif kind != "none":
        raise NotCoveredError(f"{file.path}: rope scaling {kind!r:.80} is not supported; may be none, linear, yarn")
    return parameters


def _yarn(own: Metadata) -> Fields:
    names = {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
    found: Fields = {
        field: own.number(f"rope.scaling.{key}") for field, key in names.items() if f"rope.scaling.{key}" in own
    }
    return found | {"original_max_position_embeddings": own.integer("rope.scaling.original_context_length")}


def _local_rope(own: Metadata) -> Fields:
    """Gemma 3's rotary embedding in layers with a window."""
    return {"rope_type": "default", "rope_theta": own.number("rope.freq_base_swa", 10_000.0)}


def _factors(file: GGUFFile) -> tuple[float, ...]:
    """Llama 3's stretch of the context: what each frequency is divided by."""
    place = file.tensors[ROPE_FACTORS]
    if place.type.name != "F32" or len(place.shape) != 1:
        raise ModelError(
            f"{file.path}: tensor {ROPE_FACTORS!r} is no list of fp32 numbers; convert the original model again"
        )
    factors = load_tensor(place)
    assert isinstance(factors, torch.Tensor), "fp32 is no block format"
    if not (factors.isfinite().all() and (factors > 0).all()):
        raise ModelError(f"{file.path}: tensor {ROPE_FACTORS!r} holds numbers that are not positive; download it again")
    return tuple(factors.tolist())
