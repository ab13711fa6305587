"""The architectures that are read from GGUF files: one row for each name that llama.cpp gives them.

A row says which family of models.families it is, how its metadata become that family's configuration, and what its
tensors are called. Values that neither a file nor the original configuration holds are those in llama.cpp's code.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from forerun.errors import ModelError, did_you_mean
from forerun.models.config import (
    GPT_OSS_EXPERTS,
    GRANITE_EXPERTS,
    MIXTRAL_EXPERTS,
    OWN_EXPERTS,
    ExpertNames,
    NotCoveredError,
)
from forerun.models.config_defaults import ORIGINAL
from forerun.models.gguf.file import GGUFFile

Fields = dict[str, Any]
"""Fields of config.json by name."""

PLACES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_sinks": "self_attn.sinks",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
WITHOUT_KIND = "self_attn.sinks"  # a tensor of one kind, which the decoder's name does not say
POST_NORM_PARTS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
SANDWICH_NORM_PARTS = {**POST_NORM_PARTS, "ffn_norm": "pre_feedforward_layernorm"}
ROUTER, GATES, UPS, DOWNS = "ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"
"""What a mixture of experts consists of; all but the router hold every expert's matrix, one after the other."""

FUSED = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}

EMBEDDING, HEAD = "token_embd.weight", "output.weight"
ROPE_FACTORS = "rope_freqs.weight"
LONGROPE_FACTORS = {"short_factor": "rope_factors_short.weight", "long_factor": "rope_factors_long.weight"}
"""LongRoPE's factors: the names of config.json, and of the tensors."""
LAYER_TENSOR = re.compile(r"blk\.(?P<layer>\d+)\.(?P<part>\w+)\.(?P<kind>weight|bias)")
OTHER_TENSOR = re.compile(r"(?P<part>\w+)\.(?P<kind>weight|bias)")


def _nothing(_file: GGUFFile) -> Fields:
    """A family's configuration without fields of its own."""
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFArchitecture:
    """One architecture.

    Attributes:
        name: llama.cpp's, in `general.architecture`.
        model_type: transformers', of its family.
        fields: what this family's configuration has besides the fields of all.
        yarn: likewise of the parameters of a rope that yarn stretches.
        parts: the decoder's names of what a layer consists of, where they differ from `PARTS`.
        has_pairs: whether rows of queries and keys lie as (first, second) of each rotated pair, not all firsts before all seconds.
        norm_offset: what is added to the weights of norms in the file.
    """

    name: str
    model_type: str
    fields: Callable[[GGUFFile], Fields] = _nothing
    yarn: Fields = field(default_factory=dict)
    parts: dict[str, str] = field(default_factory=dict)
    has_pairs: bool = False
    norm_offset: float = 0.0

    def tensor_name(self, stored: str) -> str:
        """Return the decoder's name of a tensor; a name that it has no place for comes back as it is.

        That of all experts together is one's, with {} in place of its number.
        """
        if found := LAYER_TENSOR.fullmatch(stored):
            part = (PARTS | self.parts).get(found["part"])
            if part is None:
                return stored
            own = f"model.layers.{found['layer']}.{part}"
            return own if part == WITHOUT_KIND else f"{own}.{found['kind']}"
        found = OTHER_TENSOR.fullmatch(stored)
        return stored if found is None or found["part"] not in PLACES else f"{PLACES[found['part']]}.{found['kind']}"


def architecture_of(file: GGUFFile) -> GGUFArchitecture | None:
    """Return the row of a file's architecture, or None if there is none."""
    row = ARCHITECTURES.get(file.architecture)
    return _MIXTRAL if row is _LLAMA and file.own.integer("expert_count", 0) else row


def unknown_architecture(file: GGUFFile) -> ModelError:
    """Return the error for a file whose architecture nothing can run."""
    return ModelError(
        f"{file.path} ({file.describe()}): architecture {file.architecture!r:.80} is not known"
        f"{did_you_mean(file.architecture, ARCHITECTURES)}"
    )


def _llama(file: GGUFFile) -> Fields:
    return {
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
    }


def _qwen2(_file: GGUFFile) -> Fields:
    return {"use_sliding_window": False, "sliding_window": None, "max_window_layers": 0}


def _qwen3(file: GGUFFile) -> Fields:
    return _qwen2(file) | {"attention_bias": "blk.0.attn_q.bias" in file.tensors}


def _experts(file: GGUFFile) -> Fields:
    """How many experts there are, of which families have either name, and how many a token takes."""
    count = file.own.integer("expert_count")
    return {
        "num_experts": count,
        "num_local_experts": count,
        "num_experts_per_tok": file.own.integer("expert_used_count"),
    }


def _qwen3moe(file: GGUFFile) -> Fields:
    return (
        _experts(file)
        | _qwen3(file)
        | {"moe_intermediate_size": file.own.integer("expert_feed_forward_length"), "norm_topk_prob": True}
    )


def _olmoe(file: GGUFFile) -> Fields:
    return _experts(file) | {"norm_topk_prob": False}


def _gpt_oss(file: GGUFFile) -> Fields:
    return _experts(file) | {
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "intermediate_size": file.own.integer("expert_feed_forward_length"),
        "sliding_window": file.own.integer("attention.sliding_window"),
    }


def _smollm3(file: GGUFFile) -> Fields:
    layers = file.own.integer("block_count")
    every_fourth = [int((layer + 1) % 4 != 0) for layer in range(layers)]  # 1: it rotates
    return _llama(file) | {
        "use_sliding_window": False,
        "sliding_window": None,
        "no_rope_layers": every_fourth,
    }


def _granite(file: GGUFFile) -> Fields:
    """Granite's fields; as in llama.cpp, a scale of 0 is none."""
    if not file.own.flag("rope.scaling.finetuned", True):
        raise NotCoveredError(f"{file.path}: this Granite has no rotary embedding, which the decoder does not compute")
    head_dim = _head_dim(file)
    return _llama(file) | {
        "attention_multiplier": file.own.number("attention.scale", 0.0) or head_dim**-0.5,
        "embedding_multiplier": file.own.number("embedding_scale", 0.0) or 1.0,
        "residual_multiplier": file.own.number("residual_scale", 0.0) or 1.0,
        "logits_scaling": file.own.number("logit_scale", 0.0) or 1.0,
    }


def _granitemoe(file: GGUFFile) -> Fields:
    return _experts(file) | _granite(file)


def _gemma(file: GGUFFile, *, wide_layers: int) -> Fields:
    """Gemma's fields; the model with `wide_layers` layers scales its scores by the heads' share of the hidden size."""
    scalar = _head_dim(file)
    if file.own.integer("block_count") == wide_layers:
        scalar = file.own.integer("embedding_length") // file.own.integer("attention.head_count")
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
    }


def _gemma2(file: GGUFFile) -> Fields:
    return _gemma(file, wide_layers=46) | {
        "sliding_window": file.own.integer("attention.sliding_window", 4096),
        "attn_logit_softcapping": file.own.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": file.own.number("final_logit_softcapping", 30.0),
    }


def _gemma3(file: GGUFFile) -> Fields:
    window = file.own.integer("attention.sliding_window", 0)
    fields: Fields = _gemma(file, wide_layers=62) | {
        "sliding_window": window or None,
        "final_logit_softcapping": file.own.number("final_logit_softcapping", 0.0) or None,
    }
    pattern = "attention.sliding_window_pattern"
    period = file.own.integer(pattern) if pattern in file.own else None
    if not window or period == 0:  # as in llama.cpp, in a period of 0 no layer sees everything
        kind = "sliding_attention" if window else "full_attention"
        fields["layer_types"] = [kind] * file.own.integer("block_count")
    elif period is not None:
        fields["sliding_window_pattern"] = period
    return fields


def _phi3(file: GGUFFile) -> Fields:
    return {
        "sliding_window": file.own.integer("attention.sliding_window", 0) or None,
        ORIGINAL: file.own.integer("rope.scaling.original_context_length", file.own.integer("context_length")),
    }


def _head_dim(file: GGUFFile) -> int:
    heads = file.own.integer("attention.head_count")
    return file.own.integer("attention.key_length", file.own.integer("embedding_length") // max(heads, 1))


def _expert_parts(names: ExpertNames) -> dict[str, str]:
    return {ROUTER: names.router, GATES: names.gate, UPS: names.up, DOWNS: names.down}


_LLAMA = GGUFArchitecture(name="llama", model_type="llama", fields=_llama, has_pairs=True)
_MIXTRAL = replace(_LLAMA, model_type="mixtral", fields=_experts, parts=_expert_parts(MIXTRAL_EXPERTS))

_ROWS = (
    _LLAMA,
    GGUFArchitecture(name="qwen2", model_type="qwen2", fields=_qwen2),
    GGUFArchitecture(name="qwen3", model_type="qwen3", fields=_qwen3),
    GGUFArchitecture(name="qwen3moe", model_type="qwen3_moe", fields=_qwen3moe, parts=_expert_parts(OWN_EXPERTS)),
    GGUFArchitecture(name="smollm3", model_type="smollm3", fields=_smollm3, has_pairs=True),
    GGUFArchitecture(name="gemma2", model_type="gemma2", fields=_gemma2, parts=SANDWICH_NORM_PARTS, norm_offset=1.0),
    GGUFArchitecture(
        name="gemma3", model_type="gemma3_text", fields=_gemma3, parts=SANDWICH_NORM_PARTS, norm_offset=1.0
    ),
    GGUFArchitecture(name="phi3", model_type="phi3", fields=_phi3, parts=FUSED),
    GGUFArchitecture(name="olmo2", model_type="olmo2", parts=POST_NORM_PARTS),
    GGUFArchitecture(name="olmoe", model_type="olmoe", fields=_olmoe, parts=_expert_parts(OWN_EXPERTS)),
    GGUFArchitecture(name="granite", model_type="granite", fields=_granite, has_pairs=True),
    GGUFArchitecture(
        name="granitemoe",
        model_type="granitemoe",
        fields=_granitemoe,
        parts=_expert_parts(GRANITE_EXPERTS),
        has_pairs=True,
    ),
    GGUFArchitecture(
        name="gpt-oss",
        model_type="gpt_oss",
        fields=_gpt_oss,
        yarn={"truncate": False},  # as OpenAI's own code; no metadata says it
        parts={"post_attention_norm": "post_attention_layernorm", **_expert_parts(GPT_OSS_EXPERTS)},
    ),
)

ARCHITECTURES: dict[str, GGUFArchitecture] = {row.name: row for row in _ROWS}
"""The rows by name."""
