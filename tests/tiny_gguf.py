"""A Llama model with its tokenizer in a GGUF file small enough for tests."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
from transformers import PreTrainedTokenizerFast

from tests.tiny_tokenizer import save_tiny_tokenizer

HIDDEN, HEADS, KV_HEADS, LAYERS, FEED_FORWARD, VOCAB = 32, 4, 2, 2, 64, 264
HEAD_DIM = HIDDEN // HEADS


def save_tiny_gguf(path: Path, *, quantized: bool = False) -> dict[str, np.ndarray]:
    """Write a random model to `path` (fp32, or Q8_0 where `quantized`); return its tensors by GGUF name.

    Tensors are as in the file: rows of queries and keys lie as llama.cpp orders them for its rotary
    embedding, not as transformers does.
    """
    tensors = _tensors()
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCAB)
    add_tiny_tokenizer(writer, path.parent / "words")
    for name, tensor in tensors.items():
        if quantized and tensor.ndim == 2:
            packed = gguf.quantize(tensor, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(name, packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def _tensors() -> dict[str, np.ndarray]:
    """Random weights; no output.weight, so embeddings are tied."""
    shapes = {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.attn_norm.weight": (HIDDEN,),
            f"blk.{layer}.attn_q.weight": (HIDDEN, HIDDEN),
            f"blk.{layer}.attn_k.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"blk.{layer}.attn_v.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"blk.{layer}.attn_output.weight": (HIDDEN, HIDDEN),
            f"blk.{layer}.ffn_norm.weight": (HIDDEN,),
            f"blk.{layer}.ffn_gate.weight": (FEED_FORWARD, HIDDEN),
            f"blk.{layer}.ffn_up.weight": (FEED_FORWARD, HIDDEN),
            f"blk.{layer}.ffn_down.weight": (HIDDEN, FEED_FORWARD),
        }
    random = np.random.default_rng(0)
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def add_tiny_tokenizer(writer: gguf.GGUFWriter, folder: Path) -> None:
    """Add the tiny tokenizer, in the terms of GGUF."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(save_tiny_tokenizer(folder, vocab_size=VOCAB))
    words = tokenizer.convert_ids_to_tokens(list(range(VOCAB)))
    special = set(tokenizer.all_special_ids) | {1}
    kinds = [gguf.TokenType.CONTROL if index in special else gguf.TokenType.NORMAL for index in range(VOCAB)]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(words)
    writer.add_token_types(kinds)
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(tokenizer.chat_template)
