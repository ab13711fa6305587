"""AWQ (arXiv 2306.00978) as AutoAWQ stores it in its version "gemm": codes packed along the outputs, transposed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from forerun.models.quantized.layout import SCALES, WORDS, Kinds, Parts, Setting, Shapes, expect_shape
from forerun.models.quantized.packed_codes import WORD_BITS, block_weight, unpack_words
from forerun.ops.block_weight import BlockWeight

BITS = 4
PER_WORD = WORD_BITS // BITS
ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in a word the code of each of its eight outputs is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AWQLayout:
    """scale * (code - zero), by groups of inputs.

    `qweight` int32 [inputs, outputs / 8], `qzeros` int32 [groups, outputs / 8] and `scales` [groups, outputs].
    """

    main: ClassVar[str] = "qweight"
    needed: ClassVar[Kinds] = {"qweight": WORDS, "qzeros": WORDS, "scales": SCALES}
    optional: ClassVar[Kinds] = {}

    def shape(self, shapes: Shapes) -> tuple[int, int]:
        """See `QuantizedLayout`."""
        inputs, words = shapes["qweight"]
        return words * PER_WORD, inputs

    def load(self, name: str, parts: Parts) -> BlockWeight:
        """See `QuantizedLayout`."""
        words, scales = parts["qweight"], parts["scales"]
        groups, words_of_outputs = len(scales), words.shape[1]
        expect_shape(name, "scales", scales, (groups, words_of_outputs * PER_WORD))
        expect_shape(name, "qzeros", parts["qzeros"], (groups, words_of_outputs))
        codes = unpack_words(words, BITS, ORDER)
        zeros = unpack_words(parts["qzeros"], BITS, ORDER)
        return block_weight(name, codes.T, zeros.T, scales.T)


def read_awq(settings: Mapping[str, Any]) -> AWQLayout:
    """See `MethodReader`."""
    bits = settings.get("bits", settings.get("w_bit", BITS))
    version = str(settings.get("version") or settings.get("format") or "gemm").lower()  # its older name and its newer
    if bits != BITS:
        raise Setting("awq", "bits").refuse(bits, str(BITS))
    if version != "gemm":
        raise Setting("awq", "version").refuse(version, "gemm")
    if not settings.get("zero_point", True):
        raise Setting("awq", "zero_point").refuse(False, "true")
    return AWQLayout()
