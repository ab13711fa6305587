"""GGUF files of architectures outside forerun's table, through transformers' reader: slow, and only where transformers has one.

transformers reads them with the packages gguf and accelerate. It believes what a file says, so that is checked before: the
header by forerun's own reader, and here how much it promises.
"""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from forerun.errors import ModelError, one_line
from forerun.models.config import MOST_LAYERS
from forerun.models.families import decoder_config
from forerun.models.gguf.architectures import architecture_of, unknown_architecture
from forerun.models.gguf.config import config_of
from forerun.models.gguf.file import GGUFFile
from forerun.models.transformers_logging import quiet_transformers

try:
    from transformers import GgufConfig

    # later releases keep GGUF weights packed by default
    DENSE_WEIGHTS: dict[str, Any] = {"quantization_config": GgufConfig(dequantize=True)}
except ImportError:
    DENSE_WEIGHTS = {}

NEEDED = ("gguf", "accelerate")
MOST_ELEMENTS = 1 << 20  # of all arrays together, of each of which transformers' reader makes objects
UNSTORED = 1 << 20  # weights and buffers that a model may have besides those of its file


def read_transformers_gguf_config(file: GGUFFile) -> PretrainedConfig:
    """Read the configuration with transformers, as its own object.

    Raises:
        ModelError: transformers does not know the architecture, or a package is missing.
    """
    row = architecture_of(file)
    if row is not None:
        fields = config_of(file, row).to_dict()
        with quiet_transformers():
            return AutoConfig.for_model(fields.pop("model_type"), **fields)
    _check_counts(file)
    with _reading(file):
        config: PretrainedConfig = AutoConfig.from_pretrained(**_source(file))
    return config


def load_transformers_gguf(
    file: GGUFFile, config: PretrainedConfig, *, dtype: torch.dtype | None
) -> tuple[Any, dict[str, Any]]:
    """Load transformers' model with dense weights in `dtype`; return it and what transformers reports of the tensors.

    With dtype None the weights have the file's float type, or fp32 where it is quantized.

    Raises:
        ModelError: the decoder has a row for the architecture, but no code for this model, which transformers'
            reader would take for another; or the file is damaged, or a package is missing.
    """
    row = architecture_of(file)
    if row is not None:
        decoder_config(config_of(file, row))  # says what it has no code for
    _check_backed(file, config)
    with _reading(file):
        from_pretrained: Any = AutoModelForCausalLM.from_pretrained
        loaded: tuple[Any, dict[str, Any]] = from_pretrained(
            **_source(file),
            **DENSE_WEIGHTS,
            dtype=dtype or "auto",
            output_loading_info=True,
            trust_remote_code=False,
        )
    model, info = loaded
    model.hf_quantizer = None  # the weights are dense now
    return model, info


def _check_counts(file: GGUFFile) -> None:
    """Check what transformers makes objects of: elements of arrays, and layers.

    Raises:
        ModelError: there are more than a model has.
    """
    num_layers = file.own.integer("block_count", 0)
    for what, count, most in (
        ("elements of arrays", file.metadata.num_elements, MOST_ELEMENTS),
        ("layers", num_layers, MOST_LAYERS),
    ):
        if count > most:
            raise ModelError(
                f"{file.path} ({file.describe()}): promises {count} {what}; may have at most {most}; download it again"
            )


def _check_backed(file: GGUFFile, config: PretrainedConfig) -> None:
    """Check, without memory, that the model which a file describes is about as large as the tensors that it has.

    Raises:
        ModelError: it is larger, or transformers makes no model of it.
    """
    with _reading(file), torch.device("meta"):
        from_config: Any = AutoModelForCausalLM.from_config
        model = from_config(config, trust_remote_code=False)
    promised = sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))
    stored = sum(math.prod(place.shape) for place in file.tensors.values())
    if promised > 2 * stored + UNSTORED:
        raise ModelError(
            f"{file.path} ({file.describe()}): promises {promised} weights, but holds {stored}; download it again"
        )


def _source(file: GGUFFile) -> dict[str, Any]:
    """Return the arguments by which transformers' `from_pretrained` finds the file."""
    folder = str(file.path.parent.absolute())
    return {"pretrained_model_name_or_path": folder, "gguf_file": file.path.name, "local_files_only": True}


@contextlib.contextmanager
def _reading(file: GGUFFile) -> Iterator[None]:
    """Raise what transformers raises on this file as a `ModelError`, and silence it."""
    absent = [package for package in NEEDED if find_spec(package) is None]
    if absent:
        raise ModelError(f"{unknown_architecture(file)}; transformers reads some others: pip install {absent[0]}")
    try:
        # transformers' GGUF progress bar has no switch: it goes to whatever standard error is
        with quiet_transformers(), contextlib.redirect_stderr(io.StringIO()):
            yield
    except Exception as error:
        raise ModelError(
            f"{unknown_architecture(file)}; transformers does not read it either ({one_line(error)})"
        ) from error
