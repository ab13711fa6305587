"""Reads models in GGUF files with transformers, and converts them to safetensors."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig

from forerun.errors import ModelError, one_line
from forerun.models.checkpoint import StateDict
from forerun.models.model_folder import CONFIG_FILE
from forerun.models.transformers_logging import quiet_transformers

try:
    from transformers import GgufConfig

    # later releases keep GGUF weights packed by default
    DENSE_WEIGHTS: dict[str, Any] = {"quantization_config": GgufConfig(dequantize=True)}
except ImportError:
    DENSE_WEIGHTS = {}

END_OF_TEXT = "<|endoftext|>"  # ends a document where a chat's turns end with another token


def gguf_source(gguf: Path) -> dict[str, Any]:
    """Return the arguments by which transformers' `from_pretrained` finds the file.

    Raises:
        ModelError: it is missing, or is not a GGUF file.
    """
    if not gguf.is_file():
        raise ModelError(f"{gguf}: there is no such file; check the path")
    with gguf.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ModelError(f"{gguf}: not a GGUF file (its first bytes are not 'GGUF'); download it again")
    folder = str(gguf.parent.absolute())
    return {"pretrained_model_name_or_path": folder, "gguf_file": gguf.name, "local_files_only": True}


def read_gguf_config(gguf: Path) -> PretrainedConfig:
    """Read the model's configuration from the file's metadata.

    Raises:
        ModelError: it is damaged, or its architecture is unknown to transformers.
    """
    source = gguf_source(gguf)
    with _reading(gguf):
        config: PretrainedConfig = AutoConfig.from_pretrained(**source)
    return config


def load_gguf_model(gguf: Path, *, dtype: torch.dtype | None) -> tuple[Any, dict[str, Any]]:
    """Load transformers' model with dense weights in `dtype`; return it and what transformers reports of the tensors.

    With dtype None the weights have the file's float type, or fp32 where it is quantized. By default
    transformers would keep the weights packed, in layers of its own.

    Raises:
        ModelError: the file is damaged, or something needed to read it is missing.
    """
    source = gguf_source(gguf)
    if find_spec("accelerate") is None:
        raise ModelError(f"{gguf}: transformers reads GGUF with the package accelerate; run 'pip install accelerate'")
    with _reading(gguf):
        from_pretrained: Any = AutoModelForCausalLM.from_pretrained
        loaded: tuple[Any, dict[str, Any]] = from_pretrained(
            **source,
            **DENSE_WEIGHTS,
            dtype=dtype or "auto",
            output_loading_info=True,
            trust_remote_code=False,
        )
    model, info = loaded
    # the weights are dense now; with its quantizer the model could be neither saved nor cast
    model.hf_quantizer = None
    return model, info


def load_gguf(gguf: Path, *, dtype: torch.dtype | None = None) -> tuple[PretrainedConfig, StateDict]:
    """Load the configuration and all weights (dequantized, in `dtype`) of a GGUF file.

    Raises:
        ModelError: the file cannot be read, or does not fit its architecture.
    """
    model, info = load_gguf_model(gguf, dtype=dtype)
    # tied weights are in the state dict under both names, in a checkpoint once
    tied = model.all_tied_weights_keys if model.config.tie_word_embeddings else {}
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    absent = sorted(set(info["missing_keys"]) - set(tied))
    if absent:
        raise ModelError(f"{gguf}: tensor {absent[0]!r} is missing; the file is incomplete, download it again")
    return model.config, StateDict(tensors)


def convert_gguf(gguf: Path, folder: Path, *, dtype: torch.dtype) -> None:
    """Write the model in `gguf` to `folder` as a Hugging Face model: safetensors in `dtype`.

    Beside the weights: config.json, generation_config.json and the tokenizer with its chat template.

    Raises:
        ModelError: the file cannot be read.
    """
    model, _ = load_gguf_model(gguf, dtype=dtype)
    with _reading(gguf):
        tokenizer = AutoTokenizer.from_pretrained(**gguf_source(gguf))
    model.config.dtype = dtype
    with quiet_transformers():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    for file in folder.glob("*.safetensors"):  # safetensors makes files that only their owner may read
        shutil.copymode(folder / CONFIG_FILE, file)
    generation = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": _ends_of_text(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
    }
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")


def _ends_of_text(tokenizer: Any) -> list[int]:
    """Return the ids that end a text: the tokenizer's eos and, in chat models whose eos ends a turn, <|endoftext|>."""
    ends = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    end_of_text = tokenizer.get_vocab().get(END_OF_TEXT)
    return ends if end_of_text is None or end_of_text in ends else [*ends, end_of_text]


@contextlib.contextmanager
def _reading(gguf: Path) -> Iterator[None]:
    """Raise what transformers raises on this file as a `ModelError`, and silence it."""
    try:
        # transformers' GGUF progress bar has no switch: it goes to whatever standard error is
        with quiet_transformers(), contextlib.redirect_stderr(io.StringIO()):
            yield
    except Exception as error:
        raise ModelError(
            f"{gguf}: cannot be read ({one_line(error)}); if the file is whole, convert the original model instead"
        ) from error
