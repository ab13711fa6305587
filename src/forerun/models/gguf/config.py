"""The configuration of a model in a GGUF file, from the file's metadata: the same object that config.json becomes."""

from __future__ import annotations

from functools import lru_cache

import torch

from forerun.errors import ModelError, one_line
from forerun.models.completed_config import ConfigStandIn, completed
from forerun.models.config import MEND, ROTATED, NotCoveredError
from forerun.models.config_defaults import ORIGINAL
from forerun.models.families import MODEL_TYPES, decoder_config
from forerun.models.gguf.architectures import (
    EMBEDDING,
    HEAD,
    LAYER_TENSOR,
    LONGROPE_FACTORS,
    ROPE_FACTORS,
    ROUTER,
    Fields,
    GGUFArchitecture,
)
from forerun.models.gguf.file import GGUFFile
from forerun.models.gguf.metadata import Metadata
from forerun.models.gguf.pieces import end_tokens
from forerun.models.gguf.tensors import are_mixed, load_tensor
from forerun.ops.rotary import yarn_attention_factor

TOKENS = "tokenizer.ggml.tokens"
END_ROLES = ("eos", "eot", "eom")  # of a text, of a turn, of a message that calls tools
OTHER_ROLES = {"bos_token_id": "bos", "pad_token_id": "padding"}
ROLES = (*END_ROLES, *OTHER_ROLES.values())
OTHER_SCALING = {"yarn_attn_factor": 1.0, "yarn_log_multiplier": 0.0, "alpha": 0.0}
NEUTRAL_EXPERTS = {
    "expert_shared_count": (0,),
    "expert_shared_feed_forward_length": (0,),
    "expert_group_count": (0, 1),
    "expert_weights_scale": (0, 1),
    "expert_gating_func": (0, 1),  # not said, softmax
    "leading_dense_block_count": (0,),
}
"""What llama.cpp knows of experts besides, if for other architectures, and which values change nothing."""

NEUTRAL_SCALING = {
    "none": {**OTHER_SCALING, "yarn_ext_factor": 0.0, "attn_factor": 1.0},
    "linear": {**OTHER_SCALING, "yarn_ext_factor": 0.0, "attn_factor": 1.0},
    "yarn": {**OTHER_SCALING, "yarn_ext_factor": 1.0},
    "longrope": {**OTHER_SCALING, "yarn_ext_factor": 0.0},
}
"""By the type of a rope's scaling: what llama.cpp knows besides, if for other architectures, and which values change nothing."""
FACTORS_OF_SCALING = {
    "none": (ROPE_FACTORS,),
    "linear": (ROPE_FACTORS,),
    "yarn": (),
    "longrope": tuple(LONGROPE_FACTORS.values()),
}
"""By the type of a rope's scaling: the tensors with factors that may stand beside it."""


def config_of(file: GGUFFile, row: GGUFArchitecture) -> ConfigStandIn:
    """Make the configuration that the decoder resolves.

    Raises:
        ModelError: metadata are missing or contradict each other, or the decoder has no code for what they ask for.
    """
    own = file.own
    if own.integer("expert_count", 0) and ROUTER not in row.parts:
        raise NotCoveredError(
            f"{file.path} ({file.describe()}): architecture {row.name!r} with {own.integer('expert_count')} experts is not "
            "supported; use a model without experts"
        )
    for key, neutral in NEUTRAL_EXPERTS.items():
        if (found := own.number(key, neutral[0])) not in neutral:
            raise NotCoveredError(
                f"{file.path} ({file.describe()}): metadata {file.architecture}.{key}: got {found:g}; is supported with "
                f"{' or '.join(map('{:g}'.format, neutral))} alone"
            )
    if not own.flag("attention.causal", True):
        raise NotCoveredError(
            f"{file.path} ({file.describe()}): metadata {file.architecture}.attention.causal: got false; must be true, as text "
            "is generated left to right"
        )
    family = MODEL_TYPES[row.model_type]
    try:
        fields = _sizes(file) | _tokens(file) | row.fields(file)
        if own.integer("attention.sliding_window", 0) and "sliding_window" not in fields:
            raise NotCoveredError(f"{file.path}: architecture {row.name!r} with a sliding window is not supported")
        config = completed({**fields, "model_type": row.model_type}, family)
    except (ArithmeticError, TypeError, ValueError) as error:
        raise ModelError(
            f"{file.path}: its metadata cannot be used ({one_line(error)}); convert the original model again"
        ) from error
    rope = _rope(file, row)
    has_two = row.model_type == "gemma3_text"
    config.rope_parameters = {"full_attention": rope, "sliding_attention": _local_rope(own)} if has_two else rope
    _check(file, config)
    return config


def _check(file: GGUFFile, config: ConfigStandIn) -> None:
    """Let the decoder resolve a configuration, and name the file where it cannot.

    Raises:
        ModelError: metadata contradict each other, or the decoder has no code for what they ask for.
    """
    try:
        decoder_config(config)
    except ModelError as error:
        said = str(error).removesuffix(f"; {MEND}")
        raise type(error)(
            f"{file.path} ({file.describe()}): its metadata cannot be used ({said}); convert the original model again"
        ) from error


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
        "num_key_value_heads": own.integer_of_layers("attention.head_count_kv", heads),
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
    """The float type of the matrices; bf16 where they are mixed, of which the kernels take rows in bf16."""
    if are_mixed(file.matrix_types) or file.matrix_types == {"BF16"}:
        return torch.bfloat16
    return torch.float16 if file.matrix_types == {"F16"} else torch.float32


def _tokens(file: GGUFFile) -> Fields:
    """The tokens that begin, end and fill texts; as in llama.cpp, a number that no token has is none."""
    known = file.metadata.below("tokenizer.ggml")
    size = file.tensors[EMBEDDING].shape[0]
    ids = {role: known.integer(f"{role}_token_id") for role in ROLES if f"{role}_token_id" in known}
    ids = {role: token_id for role, token_id in ids.items() if token_id < size}
    ends = [ids[role] for role in END_ROLES if role in ids]
    if TOKENS in file.metadata:
        if file.metadata.count(TOKENS) > size:
            raise ModelError(
                f"{file.path}: has {file.metadata.count(TOKENS)} tokens, but embeddings of only {size}; convert the original "
                "model again"
            )
        ends += _end_tokens(file)
    others = {field: ids[role] for field, role in OTHER_ROLES.items() if role in ids}
    return {"eos_token_id": list(dict.fromkeys(ends)) or None, **others}


@lru_cache(maxsize=2)
def _end_tokens(file: GGUFFile) -> tuple[int, ...]:
    """The tokens of the vocabulary that end an answer; a start asks for the configuration several times."""
    return tuple(file.metadata.places(TOKENS, end_tokens(file)).values())


def _rope(file: GGUFFile, row: GGUFArchitecture) -> Fields:
    """The rotary embedding of all layers, or of those without a window."""
    own = file.own
    parameters: Fields = {"rope_theta": own.number("rope.freq_base", 10_000.0), **_rope_scaling(file)}
    if parameters["rope_type"] == "yarn":
        parameters |= row.yarn
    head_dim = own.integer(
        "attention.key_length", own.integer("embedding_length") // own.integer("attention.head_count")
    )
    turned = own.integer("rope.dimension_count", head_dim)
    if turned % 2 or not 0 < turned <= head_dim:
        raise ModelError(
            f"{file.path}: metadata {file.architecture}.rope.dimension_count: got {turned}; must be pairs of the {head_dim} "
            "dimensions of a head; convert the original model again"
        )
    if turned != head_dim:
        if row.has_pairs:
            raise NotCoveredError(
                f"{file.path}: architecture {row.name!r} with heads of which {turned} of {head_dim} dimensions rotate is not "
                "supported"
            )
        parameters[ROTATED] = turned
    return parameters


def _rope_scaling(file: GGUFFile) -> Fields:
    """How the rotary embedding is stretched over a longer context; as in llama.cpp, a factor without a type is linear."""
    kind = file.own.text("rope.scaling.type", "linear")
    tensors = [name for name in (ROPE_FACTORS, *LONGROPE_FACTORS.values()) if name in file.tensors]
    if kind == "linear" and set(tensors) & set(LONGROPE_FACTORS.values()):
        kind = "longrope"  # Phi-3's files name no type
    if kind not in NEUTRAL_SCALING:
        raise NotCoveredError(
            f"{file.path}: rope scaling {kind!r:.80} is not supported; may be {', '.join(NEUTRAL_SCALING)}"
        )
    for key, neutral in NEUTRAL_SCALING[kind].items():
        found = file.own.number(f"rope.scaling.{key}", neutral)
        if found != neutral:
            raise NotCoveredError(
                f"{file.path}: metadata {file.architecture}.rope.scaling.{key}: got {found:g}; rope scaling {kind!r} is "
                f"supported with {neutral:g} alone"
            )
    factor = 1.0 if kind == "none" else _factor(file.own)
    for name in tensors:
        if name not in FACTORS_OF_SCALING[kind]:
            raise NotCoveredError(f"{file.path}: rope scaling {kind!r} together with {name!r} is not supported")
    if kind == "yarn":
        return {"rope_type": kind, "factor": factor, **_yarn(file.own, factor)}
    if kind == "longrope":
        return _longrope(file, factor)
    if tensors:
        return {"rope_type": "factors", "factors": tuple(factor * divisor for divisor in _factors(file, ROPE_FACTORS))}
    return {"rope_type": "default"} if factor == 1.0 else {"rope_type": "linear", "factor": factor}


def _factor(own: Metadata) -> float:
    """By which the context is stretched; "rope.scale_linear" is the older name, and as in llama.cpp 0 is none."""
    is_older = "rope.scaling.factor" not in own and ("rope.scale_linear" in own or "rope.scaling.type" not in own)
    default = 1.0 if own.text("rope.scaling.type", "linear") == "longrope" else None  # whose tensors stretch enough
    factor = (own.number("rope.scale_linear", 1.0) if is_older else own.number("rope.scaling.factor", default)) or 1.0
    if factor < 0:
        raise ModelError(
            f"{own.file}: metadata of the rope's scaling: factor: got {factor!r}; must be a positive number; convert the "
            "original model again"
        )
    return factor


def _yarn(own: Metadata, factor: float) -> Fields:
    scaling = own.below("rope.scaling")
    names = {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}
    found: Fields = {field: scaling.number(key) for field, key in names.items() if key in scaling}
    if "attn_factor" in scaling:
        found["attention_factor"] = scaling.number("attn_factor") * yarn_attention_factor(factor)
    length = scaling.integer("original_context_length", own.integer("context_length"))
    return found | {ORIGINAL: length}


def _longrope(file: GGUFFile, factor: float) -> Fields:
    """LongRoPE's parameters; what multiplies cosine and sine is in the file, as llama.cpp does not compute it."""
    for name in LONGROPE_FACTORS.values():
        if name not in file.tensors:
            raise ModelError(f"{file.path} ({file.describe()}): tensor {name!r} is missing; download it again")
    factors = {field: _factors(file, name) for field, name in LONGROPE_FACTORS.items()}
    scaling = file.own.below("rope.scaling")
    return {
        "rope_type": "longrope",
        **{field: tuple(factor * divisor for divisor in divisors) for field, divisors in factors.items()},
        "attention_factor": scaling.number("attn_factor", 1.0),
        ORIGINAL: scaling.integer("original_context_length", file.own.integer("context_length")),
    }


def _local_rope(own: Metadata) -> Fields:
    """Gemma 3's rotary embedding in layers with a window."""
    return {"rope_type": "default", "rope_theta": own.number("rope.freq_base_swa", 10_000.0)}


def _factors(file: GGUFFile, name: str) -> tuple[float, ...]:
    """What each frequency of a rope is divided by: Llama 3's factors, or one set of LongRoPE's."""
    place = file.tensors[name]
    if place.type.name != "F32" or len(place.shape) != 1:
        raise ModelError(f"{file.path}: tensor {name!r} is no list of fp32 numbers; convert the original model again")
    factors = load_tensor(place)
    assert isinstance(factors, torch.Tensor), "fp32 is no block format"
    if not (factors.isfinite().all() and (factors > 0).all()):
        raise ModelError(f"{file.path}: tensor {name!r} holds numbers that are not positive; download it again")
    return tuple(factors.tolist())
