"""The table of architectures: each row says in what a model differs from Llama."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from forerun.errors import ModelError, did_you_mean
from forerun.models.config import (
    POST_NORMS,
    SANDWICH_NORMS,
    DecoderConfig,
    HFConfig,
    NotCoveredError,
    QKNorm,
    checked_activation,
    common_config,
    rope_config,
    windows_by_layer_type,
)
from forerun.models.mtp import mtp_prefixes
from forerun.models.quiet import one_line

Family = Callable[[HFConfig], DecoderConfig]


def _llama(hf: HFConfig) -> DecoderConfig:
    return replace(common_config(hf), qkv_bias=hf.attention_bias, output_bias=hf.attention_bias, mlp_bias=hf.mlp_bias)


def _mistral(hf: HFConfig) -> DecoderConfig:
    if hf.to_dict().get("layer_types"):  # Ministral's, whose files say Mistral
        return replace(common_config(hf), windows=windows_by_layer_type(hf))
    return _one_window(hf)


def _one_window(hf: HFConfig) -> DecoderConfig:
    return replace(common_config(hf), windows=(hf.sliding_window,) * hf.num_hidden_layers)


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


def _smollm3(hf: HFConfig) -> DecoderConfig:
    llama = _llama(hf)
    ropes = tuple(rope if rotates else None for rope, rotates in zip(llama.ropes, hf.no_rope_layers, strict=False))
    return replace(llama, ropes=ropes, windows=windows_by_layer_type(hf))


def _gemma2(hf: HFConfig) -> DecoderConfig:
    return replace(_gemma(hf), attention_soft_cap=hf.attn_logit_softcapping)


def _gemma3(hf: HFConfig) -> DecoderConfig:
    ropes = {kind: rope_config(hf, hf.rope_parameters[kind], hf.head_dim) for kind in set(hf.layer_types)}
    return replace(_gemma(hf), qk_norm=QKNorm.HEAD, ropes=tuple(ropes[kind] for kind in hf.layer_types))


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
    return replace(_one_window(hf), stored_fused=True)


def _olmo2(hf: HFConfig) -> DecoderConfig:
    return replace(
        common_config(hf),
        qkv_bias=hf.attention_bias,
        output_bias=hf.attention_bias,
        norms=POST_NORMS,
        qk_norm=QKNorm.PROJECTION,
    )


def _granite(hf: HFConfig) -> DecoderConfig:
    return replace(
        _llama(hf),
        attention_scale=hf.attention_multiplier,
        embedding_scale=hf.embedding_multiplier,
        residual_scale=hf.residual_multiplier,
        logit_scale=1 / hf.logits_scaling,
    )


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "SmolLM3ForCausalLM": _smollm3,
    "Gemma2ForCausalLM": _gemma2,
    "Gemma3ForCausalLM": _gemma3,
    "Gemma3ForConditionalGeneration": _gemma3_text_part,
    "Phi3ForCausalLM": _phi3,
    "Olmo2ForCausalLM": _olmo2,
    "GraniteForCausalLM": _granite,
}


def supports(hf: HFConfig) -> bool:
    """Whether the decoder computes this model; if not, transformers' own code may.

    Raises:
        ModelError: nothing can run it: its weights are quantized, or it does not generate left to right.
    """
    try:
        decoder_config(hf)
    except NotCoveredError:
        return False
    return True


def decoder_config(hf: HFConfig) -> DecoderConfig:
    """Resolve a transformers configuration by the row of its architecture.

    Raises:
        NotCoveredError: there is no row, or the row has no code for a value in the configuration.
        ModelError: the configuration contradicts itself, or nothing can run it.
    """
    _refuse_quantized(hf)
    architecture = (hf.architectures or ["none"])[0]
    if architecture not in FAMILIES:
        raise NotCoveredError(f"architecture {architecture!r} has no row{did_you_mean(architecture, FAMILIES)}")
    try:
        config = FAMILIES[architecture](hf)
    except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
        raise ModelError(
            f"architecture {architecture!r} of model_type {hf.model_type!r}: cannot be used ({one_line(error)}); "
            "mend config.json"
        ) from error
    if len(config.ropes) != config.num_layers:
        raise ModelError(
            f"no_rope_layers: got {len(config.ropes)}; must be one for each of {config.num_layers} layers; mend config.json"
        )
    return replace(config, unused_prefixes=(*config.unused_prefixes, *mtp_prefixes(hf)))


def _refuse_quantized(hf: HFConfig) -> None:
    quantization = hf.to_dict().get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "unknown method")
        raise ModelError(f"weights: got quantized ones ({method}); must be fp32, bf16 or fp16; use the original model")
