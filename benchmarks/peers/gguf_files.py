"""Writes a Llama checkpoint as the GGUF files that llama.cpp and OpenVINO read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy.typing as npt
import torch
from torch import Tensor

from forerun.errors import ModelError
from forerun.models.checkpoint import dense, open_checkpoint
from forerun.models.config_file import read_config

QUANTIZATIONS = {"bf16": gguf.GGMLQuantizationType.BF16, "f16": gguf.GGMLQuantizationType.F16}
FILE_TYPES = {"bf16": gguf.LlamaFileType.MOSTLY_BF16, "f16": gguf.LlamaFileType.MOSTLY_F16}
PRETOKENIZERS = {49152: "smollm", 128256: "llama-bpe"}
"""llama.cpp's name of the pretokenizer, by size of vocabulary.

llama.cpp demands a known name. The benchmark gives token ids, so a wrong one would change nothing.
"""

NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}
LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")

Array = npt.NDArray[Any]


def write_gguf(folder: Path, file: Path, kind: str) -> None:
    """Write the checkpoint of `folder` to `file` with its matrices in `kind`: "bf16" or "f16".

    Raises:
        ModelError: the architecture is not Llama, or the checkpoint has a tensor of another one.
    """
    config = read_config(folder).to_dict()
    kind_of_model = f"{config['model_type']}, rope type {config['rope_parameters']['rope_type']}"
    if kind_of_model != "llama, rope type default":
        raise ModelError(
            f"{folder}: got {kind_of_model}; only llama with the default rope can be written as GGUF here; "
            "leave llama_cpp and openvino out"
        )
    unfinished = file.with_suffix(".unfinished")
    writer = gguf.GGUFWriter(str(unfinished), "llama")
    writer.add_file_type(FILE_TYPES[kind])
    add_shape(writer, config)
    add_tokenizer(writer, folder, config)
    for name, tensor in _tensors(folder, config):
        _add_tensor(writer, name, tensor, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    unfinished.rename(file)


def order_for_ggml(weight: Tensor, num_heads: int) -> Tensor:
    """Reorder the rows of a query or key matrix, since ggml rotates neighbours and transformers halves of a head."""
    halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape)


def _tensors(folder: Path, config: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """GGUF name and contents of each tensor."""
    checkpoint = open_checkpoint(folder)
    heads = {"attn_q.weight": config["num_attention_heads"], "attn_k.weight": config["num_key_value_heads"]}
    for name in sorted(checkpoint.names()):
        layer = LAYER.fullmatch(name)
        own = layer.group(2) if layer else name
        if own not in NAMES:
            raise ModelError(
                f"{folder}: got tensor {name!r}; may be {', '.join(NAMES)}; leave llama_cpp and openvino out"
            )
        tensor = dense(checkpoint.load(name))
        if NAMES[own] in heads:
            tensor = order_for_ggml(tensor, heads[NAMES[own]])
        yield f"blk.{layer.group(1)}.{NAMES[own]}" if layer else NAMES[own], tensor


def _add_tensor(writer: gguf.GGUFWriter, name: str, tensor: Tensor, kind: str) -> None:
    """Add a tensor: a matrix in `kind`, a vector in fp32."""
    values: Array = tensor.to(torch.float32).numpy()
    if tensor.ndim == 1:
        writer.add_tensor(name, values)
    else:
        writer.add_tensor(name, gguf.quantize(values, QUANTIZATIONS[kind]), raw_dtype=QUANTIZATIONS[kind])


def add_shape(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    heads = config["num_attention_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config.get("head_dim") or config["hidden_size"] // heads)
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    if experts := config.get("num_local_experts"):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])


def add_tokenizer(writer: gguf.GGUFWriter, folder: Path, config: Mapping[str, Any]) -> None:
    """Add tokens, merges and special tokens of a tokenizer.json with a byte-level BPE."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    added = {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    words = {index: word for word, index in tokenizer["model"]["vocab"].items()} | added
    indices = range(config["vocab_size"])
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(PRETOKENIZERS.get(config["vocab_size"], "default"))
    writer.add_token_list([words.get(index, f"<unused {index}>") for index in indices])
    kinds = {True: gguf.TokenType.CONTROL, False: gguf.TokenType.NORMAL}
    writer.add_token_types([kinds[index in added] for index in indices])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)
