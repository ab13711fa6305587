"""compressed-tensors, what llm-compressor writes for vLLM: whole numbers of 4 or 8 bits, packed in words or as int8."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from forerun.errors import ModelError
from forerun.models.quantized.layout import (
    INTEGERS,
    SCALES,
    WORDS,
    Kinds,
    PartKind,
    Parts,
    QuantizedLayout,
    Setting,
    Shapes,
    expect_shape,
)
from forerun.models.quantized.packed_codes import WORD_BITS, block_weight, unpack_words, weight_of_groups
from forerun.ops.block_weight import BlockWeight

METHOD = "compressed-tensors"
BITS = (4, 8)
WIDTHS = ", ".join(f"int{bits}" for bits in BITS)
STRATEGIES = ("group", "channel")


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLayout:
    """Format "pack-quantized": scale * (code - zero), by groups of inputs or by output.

    `weight_packed` int32 [outputs, words], the last one filled up, `weight_scale` [outputs, groups], `weight_shape` [2] and,
    where there are zero points, `weight_zero_point` int32 [words of outputs, groups]. Both are stored with
    half the number of codes added, so that none is negative. `weight_g_idx` [inputs] is the group of each input where groups
    are in the order of activations (actorder "group"), or -1 where they follow each other.
    """

    bits: int
    is_symmetric: bool
    main: ClassVar[str] = "weight_packed"
    optional: ClassVar[Kinds] = {"weight_shape": INTEGERS, "weight_zero_point": WORDS, "weight_g_idx": INTEGERS}

    @property
    def needed(self) -> Kinds:
        """See `QuantizedLayout`."""
        always = {"weight_packed": WORDS, "weight_scale": SCALES}
        return always if self.is_symmetric else always | {"weight_zero_point": WORDS}

    def shape(self, shapes: Shapes) -> tuple[int, int]:
        """See `QuantizedLayout`; words are full: inputs are a multiple of 32."""
        outputs, words = shapes["weight_packed"]
        return outputs, words * WORD_BITS // self.bits

    def load(self, name: str, parts: Parts) -> BlockWeight | Tensor:
        """See `QuantizedLayout`."""
        words, scale = parts["weight_packed"], parts["weight_scale"]
        per_word = WORD_BITS // self.bits
        outputs, inputs = len(words), words.shape[1] * per_word
        groups = scale.shape[1]
        expect_shape(name, "weight_scale", scale, (outputs, groups))
        if "weight_shape" in parts and parts["weight_shape"].tolist() != [outputs, inputs]:
            raise ModelError(
                f"{name}: got a weight of shape {parts['weight_shape'].tolist()} in {list(words.shape)} words; "
                f"inputs must be a multiple of {per_word}"
            )
        codes = unpack_words(words, self.bits)
        if "weight_zero_point" in parts:
            stored = parts["weight_zero_point"]
            expect_shape(name, "weight_zero_point", stored, (-(-outputs // per_word), groups))
            zeros = unpack_words(stored.T, self.bits).T[:outputs]
        else:
            zeros = torch.full(scale.shape, 1 << self.bits - 1, dtype=torch.uint8)
        if "weight_g_idx" in parts:
            group_of = parts["weight_g_idx"]
            expect_shape(name, "weight_g_idx", group_of, (inputs,))
            if not (group_of == -1).any():
                return weight_of_groups(name, codes, zeros, scale, group_of)
        return block_weight(name, codes, zeros, scale)


@dataclass(frozen=True, slots=True)
class IntLayout:
    """Format "int-quantized": scale * code.

    `weight` int8 [outputs, inputs], and `weight_scale` [outputs, groups], or [outputs] where an output has one.
    """

    main: ClassVar[str] = "weight_scale"
    needed: ClassVar[Kinds] = {
        "weight": PartKind((torch.int8,)),
        "weight_scale": PartKind(SCALES.dtypes, (1, 2)),
    }
    optional: ClassVar[Kinds] = {}

    def shape(self, shapes: Shapes) -> tuple[int, int]:
        """See `QuantizedLayout`."""
        outputs, inputs = shapes["weight"]
        return outputs, inputs

    def load(self, name: str, parts: Parts) -> BlockWeight:
        """See `QuantizedLayout`."""
        codes, stored = parts["weight"], parts["weight_scale"]
        scale = stored if stored.dim() == 2 else stored[:, None]
        expect_shape(name, "weight_scale", scale, (len(codes), scale.shape[1]))
        return block_weight(name, codes, None, scale)


def read_compressed_tensors(settings: Mapping[str, Any]) -> QuantizedLayout:
    """See `MethodReader`."""
    groups = settings.get("config_groups")
    schemes = list(groups.values()) if isinstance(groups, Mapping) else []
    if len(schemes) != 1 or not isinstance(scheme := schemes[0], Mapping):
        got = list(groups) if isinstance(groups, Mapping) else groups
        raise Setting(METHOD, "config_groups").refuse(got, "one group: all modules have the same scheme")
    kind = scheme.get("format") or settings.get("format")
    weights = scheme.get("weights")
    if not isinstance(weights, Mapping):
        raise Setting(METHOD, "weights").refuse(weights, WIDTHS)
    bits, number, strategy = (weights.get(key) for key in ("num_bits", "type", "strategy"))
    if number != "int" or bits not in BITS:
        raise Setting(METHOD, "weights").refuse(f"{number}{bits}", WIDTHS)
    if strategy not in STRATEGIES:
        raise Setting(METHOD, "strategy").refuse(strategy, ", ".join(STRATEGIES))
    for key in ("sparsity_config", "transform_config", "kv_cache_scheme"):
        found = settings.get(key)
        if found and not (isinstance(found, Mapping) and found.get("format") == "dense"):
            raise Setting(METHOD, key).refuse(found, "left out")
    is_symmetric = bool(weights.get("symmetric", True))
    if kind == "pack-quantized":
        _check_plain_activations(scheme)
        return PackedLayout(bits=int(bits), is_symmetric=is_symmetric)
    if kind == "int-quantized" and bits == 8 and is_symmetric:
        _check_plain_activations(scheme)
        return IntLayout()
    raise Setting(METHOD, "format").refuse(kind, "pack-quantized, or int-quantized with symmetric int8")


def _check_plain_activations(scheme: Mapping[str, Any]) -> None:
    """Refuse activations in few bits: the kernels take them in bf16, which would be another model."""
    for key in ("input_activations", "output_activations"):
        activations = scheme.get(key)
        if activations:
            raise Setting(METHOD, key).refuse(
                activations.get("num_bits") if isinstance(activations, Mapping) else activations,
                "null: weights alone are in few bits (W4A16, W8A16)",
            )
