"""The decoder's configuration, and what all families resolve alike from a model's configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from forerun.errors import ModelError
from forerun.models.config_defaults import ORIGINAL

if TYPE_CHECKING:
    from forerun.ops.rotary import RopeConfig, RopeScaling

HFConfig = Any
"""A `transformers.PretrainedConfig` of any architecture, or a `ConfigStandIn`; each has fields of its own."""

ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope")
# by the type of a rope: its parameters that are lists with an entry for each frequency
FACTOR_LISTS = {"factors": ("factors",), "longrope": ("short_factor", "long_factor")}
ROTATED = "rotated_dimensions"  # a rope parameter that GGUF files alone have: how many of a head's dimensions turn

SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    "max_position_embeddings",
)

LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
MOST_LAYERS = 1 << 10  # of each of which objects are made before any weight is read

MOST_EXPERTS = 1 << 10  # of a layer

MEND = "mend config.json"
"""The remedy for values that contradict each other."""


class NotCoveredError(ModelError):
    """The decoder has no code for something in the configuration; transformers' own may have."""


class QKNorm(Enum):
    """What the RMSNorm on queries and keys runs over."""

    NONE = "none"
    HEAD = "head"
    PROJECTION = "projection"  # all heads together


@dataclass(frozen=True, slots=True)
class NormNames:
    """Checkpoint names of a layer's norms, before and after attention and MLP, or None where there is no norm."""

    attention_in: str | None
    attention_out: str | None
    mlp_in: str | None
    mlp_out: str | None


PRE_NORMS = NormNames("input_layernorm", None, "post_attention_layernorm", None)
POST_NORMS = NormNames(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
SANDWICH_NORMS = NormNames(
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertStacks:
    """Names within a layer of tensors that have the weights of all its experts, one expert after the other.

    Attributes:
        gate_up: gates and ups [experts, 2 * inner, width].
        down: what follows them [experts, width, inner].
        gate_up_bias: [experts, 2 * inner], if the file has such.
        down_bias: [experts, width], likewise.
        are_transposed: whether matrices lie as [inputs, outputs].
        are_interleaved: whether each gate's up follows it, else all gates come first.
    """

    gate_up: str
    down: str
    gate_up_bias: str | None = None
    down_bias: str | None = None
    are_transposed: bool = False
    are_interleaved: bool = False


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Checkpoint names of a mixture's weights within a layer; those of one expert have its number in place of {}.

    `stacks`: the ways in which files hold all experts in one tensor, see `models.checkpoint.UnstackedExperts`.
    """

    router: str
    gate: str
    up: str
    down: str
    stacks: tuple[ExpertStacks, ...] = ()


TRANSFORMERS_STACKS = ExpertStacks(gate_up="mlp.experts.gate_up_proj", down="mlp.experts.down_proj")
OWN_EXPERTS = ExpertNames(
    router="mlp.gate",
    gate="mlp.experts.{}.gate_proj",
    up="mlp.experts.{}.up_proj",
    down="mlp.experts.{}.down_proj",
    stacks=(TRANSFORMERS_STACKS,),
)
MIXTRAL_EXPERTS = ExpertNames(
    router="block_sparse_moe.gate",
    gate="block_sparse_moe.experts.{}.w1",
    up="block_sparse_moe.experts.{}.w3",
    down="block_sparse_moe.experts.{}.w2",
)
GRANITE_EXPERTS = replace(
    MIXTRAL_EXPERTS,
    router="block_sparse_moe.router.layer",
    stacks=(
        ExpertStacks(gate_up="block_sparse_moe.input_linear.weight", down="block_sparse_moe.output_linear.weight"),
    ),
)
_GPT_OSS_STACKS = replace(
    TRANSFORMERS_STACKS,
    gate_up_bias="mlp.experts.gate_up_proj_bias",
    down_bias="mlp.experts.down_proj_bias",
    are_interleaved=True,
)
GPT_OSS_EXPERTS = replace(
    OWN_EXPERTS,
    router="mlp.router",
    stacks=(
        replace(_GPT_OSS_STACKS, are_transposed=True),
        replace(  # in MXFP4
            _GPT_OSS_STACKS, gate_up="mlp.experts.gate_up_proj.weight", down="mlp.experts.down_proj.weight"
        ),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """The mixture of experts that each layer has in place of one MLP; see `models.layers.MixtureOfExperts`."""

    num_experts: int
    num_chosen: int  # for each token
    inner_size: int  # of one expert
    sums_to_one: bool  # the weights of a token's experts, else those of all experts together
    bias: bool = False  # on the products of the router and the experts
    names: ExpertNames = OWN_EXPERTS


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """A decoder-only transformer; defaults are Llama's."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int
    activation: str
    norm_eps: float
    attention_scale: float
    windows: tuple[int | None, ...]  # one per layer, None for full attention
    ropes: tuple[RopeConfig | None, ...]  # one per layer, None for no rotary embedding
    tied: bool  # the head is the embedding

    norms: NormNames = PRE_NORMS
    norm_offset: float = 0.0  # added to every norm weight
    qk_norm: QKNorm = QKNorm.NONE
    qkv_bias: bool = False
    output_bias: bool = False
    sinks: bool = False  # each head has a logit of its own beside those of its keys (arXiv 2309.17453)
    mlp_bias: bool = False
    experts: ExpertsConfig | None = None  # None: a layer has one MLP, of `intermediate_size`
    stored_fused: bool = False  # the checkpoint has qkv_proj and gate_up_proj
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # on what a layer adds to the residual stream
    logit_scale: float = 1.0
    root: str = "model."  # prefix of all weights but the head's
    head: str = "lm_head.weight"
    unused_prefixes: tuple[str, ...] = ()  # weights of parts that are not the decoder's

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.windows)

    @property
    def inner_size(self) -> int:
        """Gates of an MLP, or of one expert."""
        return self.intermediate_size if self.experts is None else self.experts.inner_size

    @property
    def num_mlps(self) -> int:
        """MLPs of a layer: one, or all experts."""
        return 1 if self.experts is None else self.experts.num_experts

    def for_texts_of(self, max_model_len: int | None) -> DecoderConfig:
        """Return the configuration for texts of up to `max_model_len` tokens; None: of the length that the model was trained on.

        It is the same one but for LongRoPE, which has other factors for texts beyond the trained length. Keys in the cache stay as
        they were turned, so all texts take the factors of the longest, as in vLLM and llama.cpp. With None `max_model_len` becomes
        the trained length, since the factors for longer texts compute shorter ones worse.
        """
        ropes = tuple(rope and rope.for_texts_of(max_model_len) for rope in self.ropes)
        limits = [rope.longest_text for rope in ropes if rope and rope.longest_text]
        return replace(self, ropes=ropes, max_model_len=min([self.max_model_len, *limits]))


def check_num_layers(content: Mapping[str, Any]) -> None:
    """Check the number of layers in the content of a config.json, or in its part that is about text, under any name.

    Raises:
        ModelError: it is more than a model has.
    """
    text = content.get("text_config")
    for part in (content, text if isinstance(text, Mapping) else {}):
        for name in LAYER_COUNTS:
            count = part.get(name)
            if isinstance(count, (int, float)) and count > MOST_LAYERS:
                raise ModelError(f"{name}: got {count}; may be at most {MOST_LAYERS}; {MEND}")


def common_config(hf: HFConfig, *, rotates_part: bool = False) -> DecoderConfig:
    """Resolve what all families name alike: sizes, ropes, no windows; `rotates_part`: see `rope_config`.

    Raises:
        NotCoveredError: the decoder does not have the rope or the activation.
        ModelError: a value is impossible.
    """
    content = hf.to_dict()
    if not content.get("is_causal", True):
        raise ModelError("is_causal: got False; must be True, as text is generated left to right; use another model")
    for name in SIZES:
        if getattr(hf, name) < 1:
            raise ModelError(f"{name}: got {getattr(hf, name)}; must be 1 or more; {MEND}")
    if hf.num_key_value_heads < 1 or hf.num_attention_heads % hf.num_key_value_heads:
        raise ModelError(
            f"num_key_value_heads: got {hf.num_key_value_heads}; must divide num_attention_heads "
            f"({hf.num_attention_heads}); {MEND}"
        )
    head_dim = content.get("head_dim")
    if head_dim is None:  # absent or null
        head_dim = hf.hidden_size // hf.num_attention_heads
    if head_dim < 1:
        raise ModelError(f"head_dim: got {head_dim}; must be 1 or more; {MEND}")
    parameters = hf.rope_parameters
    if content.get(ORIGINAL) is not None:  # as in transformers a length beside the rope comes before the rope's own
        parameters = {**parameters, ORIGINAL: content[ORIGINAL]}
    return DecoderConfig(
        vocab_size=hf.vocab_size,
        hidden_size=hf.hidden_size,
        intermediate_size=hf.intermediate_size,
        num_heads=hf.num_attention_heads,
        num_kv_heads=hf.num_key_value_heads,
        head_dim=head_dim,
        max_model_len=longest_text(hf.max_position_embeddings, parameters),
        activation=checked_activation(content.get("hidden_act", "silu")),
        norm_eps=hf.rms_norm_eps,
        attention_scale=head_dim**-0.5,
        windows=(None,) * hf.num_hidden_layers,
        ropes=_ropes(hf, parameters, head_dim, rotates_part=rotates_part),
        tied=hf.tie_word_embeddings,
    )


def longest_text(max_len: int, parameters: Mapping[str, Any]) -> int:
    """Return how many tokens a text may have: `max_len`, or as many as yarn stretches the trained length to.

    The latter is more where a user has added yarn to a file and left the rest as it was, as Qwen's model cards say.

    Raises:
        ModelError: a parameter is not a positive number.
    """
    if parameters.get("rope_type") != "yarn":
        return max_len
    return max(max_len, int(_original_max_len(parameters, max_len) * _number(parameters, "factor", default=1.0)))


def checked_experts(
    num_experts: int,
    num_chosen: int,
    inner_size: int,
    *,
    sums_to_one: bool,
    bias: bool = False,
    names: ExpertNames = OWN_EXPERTS,
) -> ExpertsConfig:
    """Return the mixture of experts of these sizes.

    Raises:
        ModelError: there is no such mixture.
    """
    if not 0 < num_chosen <= num_experts <= MOST_EXPERTS or inner_size < 1:
        raise ModelError(
            f"experts: got {num_chosen} of {num_experts} for each token, of size {inner_size}; may be 1 to all of at most "
            f"{MOST_EXPERTS}, of size 1 or more; {MEND}"
        )
    return ExpertsConfig(
        num_experts=num_experts,
        num_chosen=num_chosen,
        inner_size=inner_size,
        sums_to_one=sums_to_one,
        bias=bias,
        names=names,
    )


def checked_activation(name: str) -> str:
    """Return `name`, the name of an activation, if the decoder has it.

    Raises:
        NotCoveredError: the decoder does not have it.
    """
    from forerun.ops.layers import (
        ACTIVATIONS,  # here, as in all of this file: the table of families needs no torch
    )

    if name not in ACTIVATIONS:
        raise NotCoveredError(f"activation: got {name!r}; may be {', '.join(ACTIVATIONS)}; use another model")
    return name


def checked_window(hf: HFConfig) -> int | None:
    """Return how many tokens a layer with a window sees, or None if the configuration has no window.

    Raises:
        ModelError: it is not a positive number.
    """
    window: int | None = hf.sliding_window
    if window is not None and window < 1:
        raise ModelError(f"sliding_window: got {window}; must be 1 or more, or null; {MEND}")
    return window


def windows_by_layer_type(hf: HFConfig) -> tuple[int | None, ...]:
    """Return the window of each layer: the configuration's in layers of type sliding_attention, None in the others.

    Raises:
        NotCoveredError: a layer is of another type than sliding or full attention.
        ModelError: there is no window, or not one type per layer.
    """
    unknown = set(hf.layer_types) - {"full_attention", "sliding_attention"}
    if unknown:
        raise NotCoveredError(f"layer_types: got {min(unknown)!r}; may be full_attention, sliding_attention")
    if len(hf.layer_types) != hf.num_hidden_layers:
        raise ModelError(
            f"layer_types: got {len(hf.layer_types)}; must be one for each of {hf.num_hidden_layers} layers"
        )
    window = checked_window(hf) if "sliding_attention" in hf.layer_types else None
    if window is None and "sliding_attention" in hf.layer_types:
        raise ModelError("sliding_window: got None, but layers are of type sliding_attention; set it")
    return tuple(window if kind == "sliding_attention" else None for kind in hf.layer_types)


def _ropes(hf: HFConfig, parameters: Mapping[str, Any], head_dim: int, *, rotates_part: bool) -> tuple[RopeConfig, ...]:
    """Resolve the rope of each layer: one for all, or one for each type of layers.

    Raises:
        NotCoveredError: there are ropes by type of layers, but none for one of the types.
    """
    if not any(isinstance(value, Mapping) for value in parameters.values()):
        num_layers: int = hf.num_hidden_layers
        return (rope_config(hf, parameters, head_dim, rotates_part=rotates_part),) * num_layers
    absent = set(hf.layer_types) - parameters.keys()
    if absent:
        raise NotCoveredError(f"rope_parameters: got none for layers of type {min(absent)!r}; may be one for each type")
    ropes = {kind: rope_config(hf, parameters[kind], head_dim) for kind in set(hf.layer_types)}
    return tuple(ropes[kind] for kind in hf.layer_types)


def rope_config(
    hf: HFConfig, parameters: Mapping[str, Any], head_dim: int, *, rotates_part: bool = False
) -> RopeConfig:
    """Resolve one set of `rope_parameters`.

    `rotates_part`: the family turns a part of each head where partial_rotary_factor says so. As in transformers, the others
    read it for stretched ropes alone.

    Raises:
        NotCoveredError: the decoder does not have the rope type.
        ModelError: a parameter is not a positive number.
    """
    from forerun.ops.rotary import RopeConfig

    scaling = _rope_scaling(parameters, hf.max_position_embeddings)
    dim = head_dim
    if ROTATED in parameters:
        dim = int(parameters[ROTATED])
    elif rotates_part or parameters["rope_type"] != "default":
        dim = int(head_dim * _number(parameters, "partial_rotary_factor", default=1.0))
    if dim != head_dim and (dim % 2 or not 0 < dim < head_dim):
        raise ModelError(
            f"rope_parameters: partial_rotary_factor: got {parameters.get('partial_rotary_factor')!r}, so that {dim} of "
            f"{head_dim} dimensions rotate; must be pairs; {MEND}"
        )
    for factors in FACTOR_LISTS.get(parameters["rope_type"], ()):
        if len(parameters[factors]) != dim // 2:
            raise ModelError(
                f"rope_parameters: {factors}: got {len(parameters[factors])}; must be one for each of {dim // 2} frequencies; {MEND}"
            )
    return RopeConfig(dim=dim, theta=_number(parameters, "rope_theta"), scaling=scaling)


def _rope_scaling(parameters: Mapping[str, Any], max_len: int) -> RopeScaling | None:
    """Resolve how a rope is stretched over more positions than it was trained on; None if it is not."""
    from forerun.ops.rotary import FactorScaling, LinearScaling, Llama3Scaling

    rope_type = parameters["rope_type"]
    if rope_type == "default":
        return None
    if rope_type == "linear":
        return LinearScaling(_number(parameters, "factor"))
    if rope_type == "llama3":
        return Llama3Scaling(
            factor=_number(parameters, "factor"),
            low_freq_factor=_number(parameters, "low_freq_factor"),
            high_freq_factor=_number(parameters, "high_freq_factor"),
            original_max_len=_original_max_len(parameters, max_len),
        )
    if rope_type == "yarn":
        return _yarn_scaling(parameters, max_len)
    if rope_type == "longrope":
        return _longrope_scaling(parameters, max_len)
    if rope_type == "factors":  # only GGUF files name it
        return FactorScaling(tuple(parameters["factors"]))
    raise NotCoveredError(f"rope_type: got {rope_type!r}; may be {', '.join(ROPE_TYPES)}; use another model")


def _number(parameters: Mapping[str, Any], key: str, *, default: float | None = None) -> float:
    """Return the positive number under `key`, or `default` if there is none."""
    value = parameters.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ModelError(f"rope_parameters: {key}: got {value!r}; must be a positive number; {MEND}")
    return float(value)


def _original_max_len(parameters: Mapping[str, Any], max_len: int) -> float:
    return _number(parameters, ORIGINAL, default=max_len)


def _longrope_scaling(parameters: Mapping[str, Any], max_len: int) -> RopeScaling:
    from forerun.ops.rotary import LongRopeScaling, longrope_attention_factor

    original_max_len = _original_max_len(parameters, max_len)
    if original_max_len <= 1:
        raise ModelError(f"rope_parameters: {ORIGINAL}: got {original_max_len:g}; must be above 1; {MEND}")
    factor = _number(parameters, "factor", default=max_len / original_max_len)
    short, long = (_numbers(parameters, name) for name in FACTOR_LISTS["longrope"])
    return LongRopeScaling(
        short_factors=short,
        long_factors=long,
        original_max_len=original_max_len,
        attention_factor=_number(
            parameters, "attention_factor", default=longrope_attention_factor(factor, original_max_len)
        ),
    )


def _numbers(parameters: Mapping[str, Any], key: str) -> tuple[float, ...]:
    """Return the positive numbers in the list under `key`."""
    values = parameters.get(key)
    if not isinstance(values, (list, tuple)):
        raise ModelError(f"rope_parameters: {key}: got {values!r:.80}; must be a list of positive numbers; {MEND}")
    return tuple(_number({key: value}, key) for value in values)


def _yarn_scaling(parameters: Mapping[str, Any], max_len: int) -> RopeScaling:
    from forerun.ops.rotary import YarnScaling, yarn_attention_factor

    original_max_len = _original_max_len(parameters, max_len)
    factor = _number(parameters, "factor", default=max_len / original_max_len)
    theta = _number(parameters, "rope_theta")
    if theta <= 1:
        raise ModelError(f"rope_parameters: rope_theta: got {theta!r}; must be above 1 to be stretched by yarn; {MEND}")
    recommended = yarn_attention_factor(
        factor, mscale=parameters.get("mscale"), mscale_all_dim=parameters.get("mscale_all_dim")
    )
    return YarnScaling(
        factor=factor,
        original_max_len=original_max_len,
        theta=theta,
        attention_factor=_number(parameters, "attention_factor", default=recommended),
        beta_fast=_number(parameters, "beta_fast", default=32.0),
        beta_slow=_number(parameters, "beta_slow", default=1.0),
        truncate=parameters.get("truncate", True),
    )
