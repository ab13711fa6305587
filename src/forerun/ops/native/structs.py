"""The structures that the kernels read, field by field as in csrc; a library whose structures have other sizes is refused."""

from __future__ import annotations

from ctypes import POINTER, Structure, c_double, c_float, c_int32, c_int64, c_uint64, c_void_p, sizeof
from typing import ClassVar

import torch

TILE = 32
"""Outputs that lie side by side: `kTile` of csrc/matmul.h."""

INTERFACE_VERSION = 20
"""`kInterfaceVersion` of csrc/cpu.cpp."""

STORAGE = {torch.float32: 0, torch.bfloat16: 1}
"""How keys, values and rows are stored: `Storage` of csrc/matmul.h, which goes on with formats of weights."""


class WeightStruct(Structure):
    """`Weight` of csrc/matmul.h."""

    _fields_: ClassVar = [
        ("data", c_void_p),
        ("scale", c_void_p),
        ("bias", c_void_p),
        ("outputs", c_int64),
        ("inputs", c_int64),
        ("storage", c_int32),
        ("num_parts", c_int32),
        ("rare", c_void_p),
        ("first_rare", c_void_p),
        ("parts", c_void_p),
        ("row_bits", c_int64),
    ]


class AttentionStruct(Structure):
    """`AttentionShape` of csrc/attention.h."""

    _fields_: ClassVar = [
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("key_dim", c_int32),
        ("value_dim", c_int32),
        ("scale", c_float),
        ("soft_cap", c_float),
        ("window", c_int64),
        ("sinks", c_void_p),
    ]


SEQUENCE_WORDS = 7
"""int64 words of a `Sequence` of csrc/attention.h."""


class PassStruct(Structure):
    """`Pass` of csrc/attention.h; `sequences` are rows of SEQUENCE_WORDS int64."""

    _fields_: ClassVar = [
        ("num_rows", c_int64),
        ("slots", c_void_p),
        ("num_sequences", c_int64),
        ("sequences", c_void_p),
        ("block_size", c_int64),
    ]


class RotationStruct(Structure):
    """`Rotation` of csrc/layer.h."""

    _fields_: ClassVar = [("cos", c_void_p), ("sin", c_void_p), ("half", c_int64)]


class ExpertsStruct(Structure):
    """`Experts` of csrc/experts.h."""

    _fields_: ClassVar = [
        ("router", WeightStruct),
        ("gate_up", c_void_p),
        ("down", c_void_p),
        ("num_experts", c_int64),
        ("num_chosen", c_int64),
        ("sums_to_one", c_int64),
    ]


class LayerStruct(Structure):
    """`Layer` of csrc/layer.h."""

    _fields_: ClassVar = [
        ("qkv", WeightStruct),
        ("output", WeightStruct),
        ("gate_up", WeightStruct),
        ("down", WeightStruct),
        ("experts", c_void_p),
        ("attention_in", c_void_p),
        ("attention_out", c_void_p),
        ("mlp_in", c_void_p),
        ("mlp_out", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("beside_in", c_void_p),
        ("attention", AttentionStruct),
        ("width", c_int64),
        ("beside_width", c_int64),
        ("query_norm_width", c_int64),
        ("key_norm_width", c_int64),
        ("norm_eps", c_float),
        ("residual_scale", c_float),
        ("gating", c_int32),
        ("starts_normed", c_int32),
    ]


class TextIndexStruct(Structure):
    """`TextIndex` of csrc/text_index.h; `drafters.lookup.text_index` says what it means."""

    _fields_: ClassVar = [
        ("tokens", c_void_p),
        ("places", c_void_p),
        ("mask", c_int64),
        ("shift", c_int64),
        ("end", c_int64),
        ("text_start", c_int64),
        ("first_size", c_int64),
        ("second_size", c_int64),
    ]


class CopyStruct(Structure):
    """`Copy` of csrc/lookup.h: where a copy goes on, 0 where there is none, and the length of the match before it."""

    _fields_: ClassVar = [("place", c_int64), ("match", c_int64)]


class ContextTableStruct(Structure):
    """`ContextTable` of csrc/context_table.h; `drafters.recycle_table` says what it means."""

    _fields_: ClassVar = [
        ("slots", c_void_p),
        ("num_slots", c_int64),
        ("multiplier", c_uint64),
        ("num_candidates", c_int64),
    ]


class SaltContextsStruct(Structure):
    """`SaltContexts` of csrc/context_table.h: the addresses of its two tables."""

    _fields_: ClassVar = [("ones", c_void_p), ("twos", c_void_p)]


MOST_COMPUTED, MOST_RUNNERS_UP = 8, 3
"""Tokens of a computed chain that guesses are made of, and runners-up beside each of them."""


class LiveTextStruct(Structure):
    """`LiveText` of csrc/lookup.h; `drafters.lookup.live_text` says what it means."""

    _fields_: ClassVar = [
        ("own", TextIndexStruct),
        ("past", c_void_p),
        ("contexts", c_void_p),
        ("copies", CopyStruct * 2),
        ("lost_place", c_int64),
        ("num_since", c_int64),
        ("hits", c_double),
        ("expected", c_double),
        ("computed", c_int32 * MOST_COMPUTED),
        ("runners_up", c_int32 * MOST_RUNNERS_UP * MOST_COMPUTED),
        ("margin_classes", c_int32 * MOST_COMPUTED),
        ("num_computed", c_int64),
        ("next_computed", c_int64),
    ]


class TokenTableStruct(Structure):
    """`TokenTable` of csrc/inputs.h."""

    _fields_: ClassVar = [
        ("packed", POINTER(WeightStruct)),
        ("rows", c_void_p),
        ("num_tokens", c_int64),
        ("scale", c_float),
        ("storage", c_int32),
    ]


class DraftHeadStruct(Structure):
    """`DraftHead` of csrc/chain.h."""

    _fields_: ClassVar = [
        ("embedding", TokenTableStruct),
        ("fusion", POINTER(WeightStruct)),
        ("feature_norm", c_void_p),
        ("feature_norm_width", c_int64),
        ("num_features", c_int64),
        ("feature_width", c_int64),
        ("layers", c_void_p),
        ("rotation_of", c_void_p),
        ("num_layers", c_int64),
        ("output_norm", c_void_p),
        ("vocabulary", POINTER(WeightStruct)),
        ("target_ids", c_void_p),
        ("num_outputs", c_int64),
        ("norm_eps", c_float),
        ("logit_factor", c_float),
        ("logit_cap", c_float),
        ("feeds_normed", c_int32),
    ]


class DecoderStruct(Structure):
    """`Decoder` of csrc/decoder.h."""

    _fields_: ClassVar = [
        ("embedding", TokenTableStruct),
        ("layers", c_void_p),
        ("rotation_of", c_void_p),
        ("num_layers", c_int64),
        ("output_norm", c_void_p),
        ("vocabulary", POINTER(WeightStruct)),
        ("num_outputs", c_int64),
        ("norm_eps", c_float),
        ("logit_factor", c_float),
        ("logit_cap", c_float),
        ("reserved", c_int32),
    ]


class RotationTableStruct(Structure):
    """`RotationTable` of csrc/inputs.h."""

    _fields_: ClassVar = [("cos", c_void_p), ("sin", c_void_p), ("half", c_int64), ("num_positions", c_int64)]


DRAFT_TEXT_WORDS = 9
"""Words of 64 bits of a `DraftText` of csrc/chain.h."""


class SamplingSettingsStruct(Structure):
    """`SamplingSettings` of csrc/sampling.h."""

    _fields_: ClassVar = [("top_p", c_double), ("top_k", c_int64), ("temperature", c_float), ("floor", c_float)]


class RowEditsStruct(Structure):
    """`RowEdits` of csrc/sampling.h."""

    _fields_: ClassVar = [
        ("allowed", c_void_p),
        ("num_allowed", c_int64),
        ("mask", c_void_p),
        ("forbidden", c_void_p),
        ("num_forbidden", c_int64),
        ("biased", c_void_p),
        ("bias", c_void_p),
        ("num_biased", c_int64),
        ("penalised", c_void_p),
        ("counts", c_void_p),
        ("num_penalised", c_int64),
        ("repetition", c_float),
        ("frequency", c_float),
        ("presence", c_float),
        ("reserved", c_int32),
    ]


class ExchangeStruct(Structure):
    """`Exchange` of csrc/exchange.h."""

    _fields_: ClassVar = [
        ("flags", c_void_p),
        ("message", c_void_p),
        ("message_room", c_int64),
        ("update", c_void_p),
        ("attended", c_void_p),
        ("activated", c_void_p),
        ("heads", c_void_p),
        ("logits", c_void_p),
        ("candidate_ids", c_void_p),
        ("candidate_logits", c_void_p),
        ("update_room", c_int64),
        ("max_rows", c_int64),
        ("head_rows", c_int64),
        ("rank", c_int32),
        ("num_ranks", c_int32),
        ("num_threads", c_int64),
    ]


class LayerShardStruct(Structure):
    """`LayerShard` of csrc/sharded_layer.h."""

    _fields_: ClassVar = [
        ("first_head", c_int64),
        ("first_kv_head", c_int64),
        ("num_kv_heads", c_int64),
        ("first_part", c_int64),
        ("end_part", c_int64),
        ("first_output", c_int64),
        ("first_gate", c_int64),
    ]


MOST_RANKS = 64
"""`kMostRanks` of csrc/exchange.h."""

GROUP_FLAGS_BYTES = 64 * (2 + MOST_RANKS)
"""Bytes of `GroupFlags` of csrc/exchange.h."""

STACK_WORDS = 4
"""64-bit words of a `CacheStack` of csrc/decoder.h."""

DRAW_WORDS = 5
"""64-bit words of a `Draw` of csrc/sampling.h."""


STRUCT_SIZES = {
    "Weight": sizeof(WeightStruct),
    "AttentionShape": sizeof(AttentionStruct),
    "Sequence": 8 * SEQUENCE_WORDS,
    "Pass": sizeof(PassStruct),
    "Rotation": sizeof(RotationStruct),
    "Layer": sizeof(LayerStruct),
    "Experts": sizeof(ExpertsStruct),
    "RareWeight": 8,
    "TextIndex": sizeof(TextIndexStruct),
    "LiveText": sizeof(LiveTextStruct),
    "ContextTable": sizeof(ContextTableStruct),
    "SaltContexts": sizeof(SaltContextsStruct),
    "DraftHead": sizeof(DraftHeadStruct),
    "Decoder": sizeof(DecoderStruct),
    "CacheStack": 8 * STACK_WORDS,
    "RotationTable": sizeof(RotationTableStruct),
    "DraftText": 8 * DRAFT_TEXT_WORDS,
    "SamplingSettings": sizeof(SamplingSettingsStruct),
    "RowEdits": sizeof(RowEditsStruct),
    "Draw": 8 * DRAW_WORDS,
    "GroupFlags": GROUP_FLAGS_BYTES,
    "Exchange": sizeof(ExchangeStruct),
    "LayerShard": sizeof(LayerShardStruct),
}
"""Bytes of each structure of csrc that Python lays out, by its name there."""
