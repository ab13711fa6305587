"""GPTQ (arXiv 2210.17323) as AutoGPTQ and GPTQModel store it: codes packed along the inputs, transposed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from forerun.models.quantized.layout import INTEGERS, SCALES, WORDS, Kinds, Parts, Setting, Shapes, expect_shape
from forerun.models.quantized.packed_codes import WORD_BITS, block_weight, unpack_words, weight_of_groups
from forerun.ops.block_weight import BlockWeight

BITS = (2, 4, 8)  # those that fill words; 3 bits lie across them


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTQLayout:
    """scale * (code - zero), by groups of inputs.

    `qweight` int32 [inputs * bits / 32, outputs], `scales` [groups, outputs], `qzeros` int32 [groups, words of outputs],
    and `g_idx` [inputs], the group of each input: with act-order (desc_act) in any order, else and without it one after the
    other. Zero points are stored less `zero_shift`, which is 1 in the first
    version of the format, modulo the number of codes.
    """

    bits: int
    zero_shift: int
    main: ClassVar[str] = "qweight"
    needed: ClassVar[Kinds] = {"qweight": WORDS, "qzeros": WORDS, "scales": SCALES}
    optional: ClassVar[Kinds] = {"g_idx": INTEGERS}

    def shape(self, shapes: Shapes) -> tuple[int, int]:
        """See `QuantizedLayout`."""
        rows, outputs = shapes["qweight"]
        return outputs, rows * WORD_BITS // self.bits

    def load(self, name: str, parts: Parts) -> BlockWeight | Tensor:
        """See `QuantizedLayout`."""
        words, scales = parts["qweight"], parts["scales"]
        groups, outputs = len(scales), words.shape[1]
        per_word = WORD_BITS // self.bits
        expect_shape(name, "scales", scales, (groups, outputs))
        expect_shape(name, "qzeros", parts["qzeros"], (groups, -(-outputs // per_word)))
        codes = unpack_words(words.T, self.bits)
        stored = unpack_words(parts["qzeros"], self.bits)[:, :outputs]
        zeros = (stored + self.zero_shift) & (1 << self.bits) - 1
        if "g_idx" in parts:
            return weight_of_groups(name, codes, zeros.T, scales.T, parts["g_idx"])
        return block_weight(name, codes, zeros.T, scales.T)


def read_gptq(settings: Mapping[str, Any]) -> GPTQLayout:
    """See `MethodReader`."""
    bits = settings.get("bits")
    kind = settings.get("checkpoint_format") or settings.get("format") or "gptq"  # its older name and its newer
    if bits not in BITS:
        raise Setting("gptq", "bits").refuse(bits, ", ".join(map(str, BITS)))
    if kind not in ("gptq", "gptq_v2"):
        raise Setting("gptq", "checkpoint_format").refuse(kind, "gptq, gptq_v2")
    if settings.get("dynamic"):
        raise Setting("gptq", "dynamic").refuse(settings["dynamic"], "left out: all modules have the same bits")
    if settings.get("rotation"):
        raise Setting("gptq", "rotation").refuse(
            settings["rotation"], "left out: what down_proj reads would have to be rotated in each pass"
        )
    return GPTQLayout(bits=int(bits), zero_shift=1 if kind == "gptq" else 0)
