"""Converts a model in a GGUF file into a folder as the Hugging Face hub has them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun.errors import ModelError
from forerun.models.checkpoint import Checkpoint, WeightReader, save_tensors
from forerun.models.completed_config import ConfigStandIn
from forerun.models.config import FACTOR_LISTS, ROTATED
from forerun.models.config_file import read_config
from forerun.models.families import decoder_config
from forerun.models.gguf.architectures import architecture_of, unknown_architecture
from forerun.models.gguf.checkpoint import GGUFCheckpoint
from forerun.models.gguf.config import config_of
from forerun.models.gguf.file import open_gguf
from forerun.models.gguf.tokenizer import build_tokenizer, chat_template
from forerun.models.model_folder import CONFIG_FILE, GENERATION_FILE
from forerun.models.tokenizer_files import AS_STORED_CLASS


def convert_gguf(gguf: Path, folder: Path, *, dtype: torch.dtype) -> None:
    """Write the model in `gguf` to `folder`: safetensors in `dtype`, config.json, generation_config.json and the tokenizer.

    Raises:
        ModelError: the file cannot be read, or config.json has no words for its rotary embedding.
    """
    file = open_gguf(gguf)
    row = architecture_of(file)
    if row is None:
        raise unknown_architecture(file)
    config = config_of(file, row)
    if config.rope_parameters.get("rope_type") in FACTOR_LISTS:
        raise ModelError(f"{gguf}: config.json cannot hold its rope factors; use the GGUF file as it is")
    _write_json(folder / CONFIG_FILE, _fields(config, dtype))
    if decoder_config(read_config(folder)).ropes != decoder_config(config).ropes:
        raise ModelError(
            f"{gguf}: config.json cannot say of this architecture that a part of each head rotates; use the GGUF file as it is"
        )
    tokenizer, special_tokens = build_tokenizer(file)  # before the weights: it may be of a kind that is not supported
    template = chat_template(file)
    save_tensors(_tensors(GGUFCheckpoint(file, row), dtype), folder / "model.safetensors", metadata={"format": "pt"})
    tokens = {name: getattr(config, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(folder / GENERATION_FILE, {name: token for name, token in tokens.items() if token is not None})
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    _write_json(folder / "tokenizer_config.json", {"tokenizer_class": AS_STORED_CLASS, **special_tokens})
    for name, text in ({"default": template} if isinstance(template, str) else template or {}).items():
        target = "chat_template.jinja" if name == "default" else f"additional_chat_templates/{name}.jinja"
        (folder / target).parent.mkdir(exist_ok=True)
        (folder / target).write_text(text, encoding="utf-8")


def _tensors(checkpoint: Checkpoint, dtype: torch.dtype) -> dict[str, Tensor]:
    reader = WeightReader(checkpoint, dtype=dtype, device=torch.device("cpu"))
    return {name: reader.tensor(name, checkpoint.shape(name)) for name in sorted(checkpoint.names())}


def _fields(config: ConfigStandIn, dtype: torch.dtype) -> dict[str, Any]:
    """What config.json holds: one end of texts, as tokenizers name it; generation_config.json has them all."""
    fields = config.to_dict()
    ends = fields["eos_token_id"]
    return fields | {
        "dtype": str(dtype).removeprefix("torch."),
        "eos_token_id": ends[0] if ends else None,
        "rope_parameters": _rope_fields(fields["rope_parameters"], fields["head_dim"]),
    }


def _rope_fields(parameters: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    """The parameters of a rope, or of one for each type of layer, with a part of the head as config.json has it."""
    if "rope_type" not in parameters:
        return {kind: _rope_fields(own, head_dim) for kind, own in parameters.items()}
    rest = {name: value for name, value in parameters.items() if name != ROTATED}
    return rest | {"partial_rotary_factor": parameters[ROTATED] / head_dim} if ROTATED in parameters else rest


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
