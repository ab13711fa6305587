"""The families of models that forerun's decoder computes: one row for each architecture.

A row holds all that differs between families: what the decoder computes, what transformers fills in where
config.json leaves it out, and whether it takes tokenizer.json as it is stored. This module imports no
torch, since reading a tokenizer needs the table too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum

from forerun.errors import ModelError, did_you_mean, one_line
from forerun.models.config import (
    GPT_OSS_EXPERTS,
    GRANITE_EXPERTS,
    MEND,
    MIXTRAL_EXPERTS,
    POST_NORMS,
    SANDWICH_NORMS,
    DecoderConfig,
    HFConfig,
    NotCoveredError,
    QKNorm,
    checked_activation,
    checked_experts,
    checked_window,
    common_config,
    windows_by_layer_type,
)
from forerun.models.config_defaults import (
    ORIGINAL,
    ConfigDefaults,
    alternating_windows,
    late_windows,
    mostly_windows,
    optional_window,
    phi3_rope,
    rope_if_given,
    rope_unless_long,
    two_ropes,
    windows_without_rope,
)
from forerun.models.model_folder import QUANTIZATION_KEY
from forerun.models.mtp_layout import mtp_prefixes


class TokenizerJson(Enum):
    """What transformers makes of a family's tokenizer.json."""

    REBUILT = "rebuilt by code of its own, so that it has to read the files"
    AS_STORED = "taken as it is stored"
    AS_STORED_UNLESS_NAMED = "as it is stored, unless tokenizer_config.json names a class that rebuilds it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One architecture that the decoder computes.

    Attributes:
        architecture: its name in config.json.
        model_type: transformers' name of its configuration.
        decoder: resolves a configuration to the decoder's.
        config: how config.json is completed without transformers, or None if transformers has to read it.
        tokenizer_json: what transformers makes of tokenizer.json.
    """

    architecture: str
    model_type: str
    decoder: Callable[[HFConfig], DecoderConfig]
    config: ConfigDefaults | None
    tokenizer_json: TokenizerJson


def _llama(hf: HFConfig) -> DecoderConfig:
    return replace(common_config(hf), qkv_bias=hf.attention_bias, output_bias=hf.attention_bias, mlp_bias=hf.mlp_bias)


def _mistral(hf: HFConfig) -> DecoderConfig:
    if hf.to_dict().get("layer_types"):  # Ministral's: its files name Mistral's architecture
        return replace(common_config(hf), windows=windows_by_layer_type(hf))
    return _one_window(hf)


def _one_window(hf: HFConfig, *, rotates_part: bool = False) -> DecoderConfig:
    common = common_config(hf, rotates_part=rotates_part)
    return replace(common, windows=(checked_window(hf),) * common.num_layers)


def _qwen2(hf: HFConfig) -> DecoderConfig:
    return replace(common_config(hf), qkv_bias=True, windows=windows_by_layer_type(hf))


def _qwen3(hf: HFConfig) -> DecoderConfig:
    return replace(
        common_config(hf),
        qkv_bias=hf.attention_bias,
        output_bias=hf.attention_bias,
        qk_norm=QKNorm.HEAD,
        windows=windows_by_layer_type(hf),
    )


def _qwen3_moe(hf: HFConfig) -> DecoderConfig:
    if hf.mlp_only_layers or hf.decoder_sparse_step != 1:
        raise NotCoveredError("mlp_only_layers, decoder_sparse_step: some layers have one MLP in place of experts")
    content = hf.to_dict()
    experts = checked_experts(
        content.get("num_experts", content.get("num_local_experts")),  # as newer versions of transformers write it
        hf.num_experts_per_tok,
        hf.moe_intermediate_size,
        sums_to_one=hf.norm_topk_prob,
    )
    attention = replace(
        common_config(hf), qkv_bias=hf.attention_bias, output_bias=hf.attention_bias, qk_norm=QKNorm.HEAD
    )
    return replace(attention, windows=(checked_window(hf),) * attention.num_layers, experts=experts)


def _mixtral(hf: HFConfig) -> DecoderConfig:
    experts = checked_experts(
        *(hf.num_local_experts, hf.num_experts_per_tok, hf.intermediate_size),
        sums_to_one=True,
        names=MIXTRAL_EXPERTS,
    )
    return replace(_one_window(hf), experts=experts)


def _smollm3(hf: HFConfig) -> DecoderConfig:
    llama = _llama(hf)
    ropes = tuple(rope if rotates else None for rope, rotates in zip(llama.ropes, hf.no_rope_layers, strict=False))
    return replace(llama, ropes=ropes, windows=windows_by_layer_type(hf))


def _gemma2(hf: HFConfig) -> DecoderConfig:
    return replace(_gemma(hf), attention_soft_cap=hf.attn_logit_softcapping)


def _gemma3(hf: HFConfig) -> DecoderConfig:
    return replace(_gemma(hf), qk_norm=QKNorm.HEAD)


def _gemma(hf: HFConfig) -> DecoderConfig:
    if hf.use_bidirectional_attention:
        raise ModelError("use_bidirectional_attention: got True; must be False, as text is generated left to right")
    return replace(
        common_config(hf),
        activation=checked_activation(hf.hidden_activation),
        norms=SANDWICH_NORMS,
        norm_offset=1.0,
        qkv_bias=hf.attention_bias,
        output_bias=hf.attention_bias,
        attention_scale=hf.query_pre_attn_scalar**-0.5,
        windows=windows_by_layer_type(hf),
        embedding_scale=hf.hidden_size**0.5,
        logit_soft_cap=hf.final_logit_softcapping,
    )


def _gemma3_text_part(hf: HFConfig) -> DecoderConfig:
    return replace(
        _gemma3(hf.text_config),
        tied=hf.tie_word_embeddings,
        logit_soft_cap=None,  # transformers reads it for the text-only architecture alone
        root="language_model.model.",
        head="language_model.lm_head.weight",
        unused_prefixes=("vision_tower.", "multi_modal_projector."),
    )


def _phi3(hf: HFConfig) -> DecoderConfig:
    return replace(_one_window(hf, rotates_part=True), stored_fused=True)


def _olmo2(hf: HFConfig) -> DecoderConfig:
    return replace(
        common_config(hf),
        qkv_bias=hf.attention_bias,
        output_bias=hf.attention_bias,
        norms=POST_NORMS,
        qk_norm=QKNorm.PROJECTION,
    )


def _olmoe(hf: HFConfig) -> DecoderConfig:
    if hf.clip_qkv is not None:
        raise NotCoveredError(f"clip_qkv: got {hf.clip_qkv}; the decoder does not clip queries, keys and values")
    experts = checked_experts(
        *(hf.num_experts, hf.num_experts_per_tok, hf.intermediate_size), sums_to_one=hf.norm_topk_prob
    )
    return replace(
        common_config(hf),
        qkv_bias=hf.attention_bias,
        output_bias=hf.attention_bias,
        qk_norm=QKNorm.PROJECTION,
        experts=experts,
    )


def _granite(hf: HFConfig) -> DecoderConfig:
    return _with_granites_factors(hf, _llama(hf))


def _granitemoe(hf: HFConfig) -> DecoderConfig:
    experts = checked_experts(
        *(hf.num_local_experts, hf.num_experts_per_tok, hf.intermediate_size), sums_to_one=True, names=GRANITE_EXPERTS
    )
    attention = replace(common_config(hf), qkv_bias=hf.attention_bias, output_bias=hf.attention_bias)
    return replace(_with_granites_factors(hf, attention), experts=experts)


def _with_granites_factors(hf: HFConfig, config: DecoderConfig) -> DecoderConfig:
    return replace(
        config,
        attention_scale=hf.attention_multiplier,
        embedding_scale=hf.embedding_multiplier,
        residual_scale=hf.residual_multiplier,
        logit_scale=1 / hf.logits_scaling,
    )


def _gpt_oss(hf: HFConfig) -> DecoderConfig:
    from forerun.ops.layers import SWIGLU_ALPHA, SWIGLU_LIMIT, SWIGLU_OAI

    content = hf.to_dict()
    for name, own in {"swiglu_alpha": SWIGLU_ALPHA, "swiglu_limit": SWIGLU_LIMIT}.items():
        if content.get(name, own) != own:
            raise NotCoveredError(f"{name}: got {content[name]}; may be {own}")
    experts = checked_experts(
        *(hf.num_local_experts, hf.num_experts_per_tok, hf.intermediate_size),
        sums_to_one=True,
        bias=True,
        names=GPT_OSS_EXPERTS,
    )
    return replace(
        common_config(hf),
        activation=SWIGLU_OAI,
        qkv_bias=hf.attention_bias,
        output_bias=hf.attention_bias,
        sinks=True,
        windows=windows_by_layer_type(hf),
        experts=experts,
    )


GATED = {"hidden_act": "silu", "tie_word_embeddings": False}
ALL_HEADS = {"num_key_value_heads": None}  # as many as there are query heads
OWN_HEADS = {"head_dim": None}  # the hidden size's share
BY_LAYER = {"layer_types": None}
EXPERT_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(
        ("num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step"),
        (int,),
    ),
    "norm_topk_prob": (bool,),
    **dict.fromkeys(("swiglu_alpha", "swiglu_limit"), (float,)),
    "mlp_only_layers": (list,),
    "clip_qkv": (float,),
}
QWEN_WINDOWS = ("num_key_value_heads", "use_sliding_window", "sliding_window", "max_window_layers")
GEMMA_NEEDED = ("num_key_value_heads", "head_dim", "sliding_window", "query_pre_attn_scalar", "hidden_activation")
GEMMA = BY_LAYER | {"tie_word_embeddings": True, "attention_bias": False}
GRANITE_FACTORS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")

ROWS = (
    Family(
        architecture="LlamaForCausalLM",
        model_type="llama",
        decoder=_llama,
        config=ConfigDefaults(values=GATED | ALL_HEADS | OWN_HEADS | {"attention_bias": False, "mlp_bias": False}),
        tokenizer_json=TokenizerJson.AS_STORED_UNLESS_NAMED,
    ),
    Family(
        architecture="MistralForCausalLM",
        model_type="mistral",
        decoder=_mistral,
        config=ConfigDefaults(
            needed=("num_key_value_heads", "sliding_window"), unusual=("layer_types",), values=GATED | OWN_HEADS
        ),
        tokenizer_json=TokenizerJson.AS_STORED,
    ),
    Family(
        architecture="MixtralForCausalLM",
        model_type="mixtral",
        decoder=_mixtral,
        config=ConfigDefaults(
            needed=("num_key_value_heads", "num_local_experts", "num_experts_per_tok"),
            types=EXPERT_TYPES,
            values=GATED | OWN_HEADS | {"sliding_window": None},
            rope=rope_unless_long,
            theta=1_000_000.0,
        ),
        tokenizer_json=TokenizerJson.AS_STORED,
    ),
    Family(
        architecture="Qwen2ForCausalLM",
        model_type="qwen2",
        decoder=_qwen2,
        config=ConfigDefaults(needed=QWEN_WINDOWS, values=GATED | BY_LAYER, fill_windows=late_windows),
        tokenizer_json=TokenizerJson.REBUILT,
    ),
    Family(
        architecture="Qwen3ForCausalLM",
        model_type="qwen3",
        decoder=_qwen3,
        config=ConfigDefaults(
            needed=(*QWEN_WINDOWS, "head_dim"),
            values=GATED | BY_LAYER | {"attention_bias": False},
            fill_windows=late_windows,
        ),
        tokenizer_json=TokenizerJson.REBUILT,
    ),
    Family(
        architecture="Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        decoder=_qwen3_moe,
        config=ConfigDefaults(
            needed=(
                "num_key_value_heads",
                "head_dim",
                "use_sliding_window",
                "num_experts_per_tok",
                "moe_intermediate_size",
            ),
            types=EXPERT_TYPES,
            values=GATED
            | {"attention_bias": False, "sliding_window": 4096, "norm_topk_prob": False}
            | {"decoder_sparse_step": 1, "mlp_only_layers": None},
            fill_windows=optional_window,
        ),
        tokenizer_json=TokenizerJson.REBUILT,
    ),
    Family(
        architecture="SmolLM3ForCausalLM",
        model_type="smollm3",
        decoder=_smollm3,
        config=ConfigDefaults(
            needed=("num_key_value_heads", "use_sliding_window", "sliding_window", "no_rope_layers"),
            types={"no_rope_layers": (list,)},
            values=GATED | BY_LAYER | {"tie_word_embeddings": True, "attention_bias": False, "mlp_bias": False},
            fill_windows=windows_without_rope,
            theta=2_000_000.0,
        ),
        tokenizer_json=TokenizerJson.AS_STORED_UNLESS_NAMED,
    ),
    Family(
        architecture="Gemma2ForCausalLM",
        model_type="gemma2",
        decoder=_gemma2,
        config=ConfigDefaults(
            needed=(*GEMMA_NEEDED, "attn_logit_softcapping", "final_logit_softcapping"),
            types={"attn_logit_softcapping": (float, type(None))},
            values=GEMMA | {"use_bidirectional_attention": None},
            fill_windows=alternating_windows,
        ),
        tokenizer_json=TokenizerJson.REBUILT,
    ),
    Family(
        architecture="Gemma3ForCausalLM",
        model_type="gemma3_text",
        decoder=_gemma3,
        config=ConfigDefaults(
            needed=GEMMA_NEEDED,
            types={"sliding_window_pattern": (int,)},
            values=GEMMA
            | {"use_bidirectional_attention": False, "final_logit_softcapping": None, "sliding_window_pattern": 6},
            fill_windows=mostly_windows,
            rope=two_ropes,
            theta=1_000_000.0,
        ),
        tokenizer_json=TokenizerJson.REBUILT,
    ),
    Family(
        architecture="Gemma3ForConditionalGeneration",
        model_type="gemma3",
        decoder=_gemma3_text_part,
        config=None,  # it has a vision part besides the text's
        tokenizer_json=TokenizerJson.REBUILT,
    ),
    Family(
        architecture="Phi3ForCausalLM",
        model_type="phi3",
        decoder=_phi3,
        config=ConfigDefaults(
            needed=("sliding_window",),
            types={ORIGINAL: (int,)},
            values=GATED | ALL_HEADS | {ORIGINAL: 4096},
            rope=phi3_rope,
        ),
        tokenizer_json=TokenizerJson.AS_STORED,
    ),
    Family(
        architecture="Olmo2ForCausalLM",
        model_type="olmo2",
        decoder=_olmo2,
        config=ConfigDefaults(values=GATED | ALL_HEADS | {"attention_bias": False}),
        tokenizer_json=TokenizerJson.AS_STORED,
    ),
    Family(
        architecture="OlmoeForCausalLM",
        model_type="olmoe",
        decoder=_olmoe,
        config=ConfigDefaults(
            needed=("num_experts", "num_experts_per_tok"),
            types=EXPERT_TYPES,
            values=GATED | ALL_HEADS | {"attention_bias": False, "clip_qkv": None, "norm_topk_prob": False},
        ),
        tokenizer_json=TokenizerJson.REBUILT,
    ),
    Family(
        architecture="GraniteForCausalLM",
        model_type="granite",
        decoder=_granite,
        config=ConfigDefaults(
            needed=GRANITE_FACTORS,
            types=dict.fromkeys(GRANITE_FACTORS, (int, float)),
            values=GATED | ALL_HEADS | {"attention_bias": False, "mlp_bias": False},
        ),
        tokenizer_json=TokenizerJson.AS_STORED,
    ),
    Family(
        architecture="GraniteMoeForCausalLM",
        model_type="granitemoe",
        decoder=_granitemoe,
        config=ConfigDefaults(
            needed=(*GRANITE_FACTORS, "num_local_experts", "num_experts_per_tok"),
            types={**dict.fromkeys(GRANITE_FACTORS, (int, float)), **EXPERT_TYPES},
            values=GATED | ALL_HEADS | {"attention_bias": False},
        ),
        tokenizer_json=TokenizerJson.AS_STORED,
    ),
    Family(
        architecture="GptOssForCausalLM",
        model_type="gpt_oss",
        decoder=_gpt_oss,
        config=ConfigDefaults(
            needed=(
                *("num_key_value_heads", "head_dim", "sliding_window"),
                *("num_local_experts", "num_experts_per_tok"),
            ),
            types=EXPERT_TYPES,
            values=GATED | BY_LAYER | {"attention_bias": True},
            fill_windows=alternating_windows,
            rope=rope_if_given,
            theta=150_000.0,
        ),
        tokenizer_json=TokenizerJson.AS_STORED_UNLESS_NAMED,
    ),
)

FAMILIES: dict[str, Family] = {family.architecture: family for family in ROWS}
"""The rows by architecture."""

MODEL_TYPES: dict[str, Family] = {family.model_type: family for family in ROWS}
"""The rows by model_type."""


def supports(hf: HFConfig) -> bool:
    """Return whether the decoder computes this model; if not, transformers' own code may.

    Raises:
        ModelError: nothing can run it: transformers would have to read quantized weights, or it does not generate
            left to right.
    """
    try:
        decoder_config(hf)
    except NotCoveredError as error:
        if hf.to_dict().get(QUANTIZATION_KEY):
            raise ModelError(
                f"quantized weights are read for forerun's own decoder alone, which does not cover this model ({error}); "
                "use the original model"
            ) from error
        return False
    return True


def decoder_config(hf: HFConfig, *, max_model_len: int | None = None) -> DecoderConfig:
    """Resolve a model's configuration to the decoder's, by the row of its architecture.

    `max_model_len`: tokens of the longest text that is asked for, see `DecoderConfig.for_texts_of`.

    Raises:
        NotCoveredError: there is no row, or the row has no code for a value in the configuration.
        ModelError: the configuration contradicts itself, or nothing can run it.
    """
    architecture = (hf.architectures or ["none"])[0]
    if architecture not in FAMILIES:
        raise NotCoveredError(f"architecture {architecture!r} has no row{did_you_mean(architecture, FAMILIES)}")
    if hf.get_text_config().to_dict().get("per_layer_config"):
        raise ModelError("per_layer_config: got layers that differ from each other; must be empty; use another model")
    try:
        config = FAMILIES[architecture].decoder(hf)
    except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
        raise ModelError(
            f"architecture {architecture!r} of model_type {hf.model_type!r}: cannot be used ({one_line(error)}); {MEND}"
        ) from error
    if len(config.ropes) != config.num_layers:
        raise ModelError(
            f"no_rope_layers: got {len(config.ropes)}; must be one for each of {config.num_layers} layers; {MEND}"
        )
    config = config.for_texts_of(max_model_len)
    return replace(config, unused_prefixes=(*config.unused_prefixes, *mtp_prefixes(hf)))
