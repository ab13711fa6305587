"""Checkpoints that others have quantized, read as they are: a file for each method, and a row of `METHODS`."""

from __future__ import annotations

from collections.abc import Mapping

from forerun.errors import ModelError
from forerun.models.quantized.awq import read_awq
from forerun.models.quantized.compressed_tensors import read_compressed_tensors
from forerun.models.quantized.gptq import read_gptq
from forerun.models.quantized.layout import MethodReader, QuantizedLayout
from forerun.models.quantized.mxfp4 import read_mxfp4

METHODS: dict[str, MethodReader] = {
    "awq": read_awq,
    "compressed-tensors": read_compressed_tensors,
    "gptq": read_gptq,
    "mxfp4": read_mxfp4,
}
"""What reads a method's settings, by the name in the configuration's `quantization_config`."""


def quantized_layout(settings: object) -> QuantizedLayout:
    """How a checkpoint stores the weights that it has quantized, by its `quantization_config`.

    Raises:
        ModelError: the method, or what its settings ask for, is not supported.
    """
    name = settings.get("quant_method") if isinstance(settings, Mapping) else settings
    if not isinstance(settings, Mapping) or not isinstance(name, str) or name not in METHODS:
        raise ModelError(
            f"quantization_config: got the method {name!r}; may be {', '.join(METHODS)}; "
            "use the original model, or a GGUF of it"
        )
    return METHODS[name](settings)
