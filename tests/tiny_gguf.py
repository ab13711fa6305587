"""A Llama model with its tokenizer in a GGUF file small enough for tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import gguf
import numpy as np
from transformers import PreTrainedTokenizerFast

from forerun.ops.block_formats import BLOCK_FORMATS
from tests.blocks import tame_blocks
from tests.tiny_tokenizer import save_tiny_tokenizer

HIDDEN, HEADS, KV_HEADS, LAYERS, FEED_FORWARD, VOCAB = 32, 4, 2, 2, 64, 264
HEAD_DIM = HIDDEN // HEADS
WIDE = 256
"""Width and feed-forward length where weights are in blocks of 256."""

PIECES = ["▁", *"thesaéin日", "▁t", "he", "▁the", "in", "▁s", "an", "the", "▁▁", "▁▁▁▁"]
"""Of a SentencePiece vocabulary, besides special tokens and bytes."""

WRITTEN = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "TQ2_0")
"""Types that the gguf package writes; blocks of others are random bytes, with scales of a size where kernels compute them."""


def save_tiny_gguf(
    path: Path,
    *,
    quantized: bool = False,
    kinds: Sequence[str] = (),
    changes: Mapping[str, np.ndarray | None] | None = None,
    tensors_per_part: int = 0,
) -> dict[str, np.ndarray]:
    """Write a random model to `path`; return its tensors by GGUF name, before they were rounded.

    Matrices are fp32, or Q8_0 where `quantized`, or of each of `kinds` in turn. Tensors are as in the file: rows of queries
    and keys lie as llama.cpp orders them for its rotary embedding, not as transformers does. `changes` are other tensors,
    or None for those that are left out; `tensors_per_part` cuts the file into parts, whose names say so.
    """
    kinds = ("Q8_0",) if quantized else kinds
    is_wide = any(gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0] > HIDDEN for kind in kinds)
    width = WIDE if is_wide else HIDDEN
    tensors = {name: x for name, x in (_tensors(width) | dict(changes or {})).items() if x is not None}
    writer = gguf.GGUFWriter(str(path), "llama", split_max_tensors=tensors_per_part)
    add_tiny_sizes(writer, width=width)
    add_tiny_tokenizer(writer, path.parent / "words")
    for number, (name, tensor) in enumerate(tensors.items()):
        if kinds and tensor.ndim == 2:
            kind = kinds[number % len(kinds)]
            writer.add_tensor(name, _blocks(kind, tensor, seed=number), raw_dtype=gguf.GGMLQuantizationType[kind])
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def _blocks(kind: str, tensor: np.ndarray, *, seed: int) -> np.ndarray:
    """A matrix in blocks: [outputs, bytes of an output] uint8"""
    if kind in WRITTEN:
        return gguf.quantize(tensor, gguf.GGMLQuantizationType[kind])
    if kind in BLOCK_FORMATS:
        return tame_blocks(kind, *tensor.shape, seed=seed, size=2e-4).data.numpy()
    weights, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    outputs, inputs = tensor.shape
    return np.random.default_rng(seed).integers(0, 120, (outputs, inputs // weights * size), dtype=np.uint8)


def add_tiny_sizes(writer: gguf.GGUFWriter, *, width: int = HIDDEN) -> None:
    """Add the sizes of the tiny model."""
    writer.add_context_length(128)
    writer.add_embedding_length(width)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(_feed_forward(width))
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(width // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCAB)


def _feed_forward(width: int) -> int:
    return WIDE if width == WIDE else FEED_FORWARD


def _tensors(width: int) -> dict[str, np.ndarray]:
    """Random weights; no output.weight, so embeddings are tied."""
    feed_forward, kv_width = _feed_forward(width), KV_HEADS * width // HEADS
    shapes = {"token_embd.weight": (VOCAB, width), "output_norm.weight": (width,)}
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.attn_norm.weight": (width,),
            f"blk.{layer}.attn_q.weight": (width, width),
            f"blk.{layer}.attn_k.weight": (kv_width, width),
            f"blk.{layer}.attn_v.weight": (kv_width, width),
            f"blk.{layer}.attn_output.weight": (width, width),
            f"blk.{layer}.ffn_norm.weight": (width,),
            f"blk.{layer}.ffn_gate.weight": (feed_forward, width),
            f"blk.{layer}.ffn_up.weight": (feed_forward, width),
            f"blk.{layer}.ffn_down.weight": (width, feed_forward),
        }
    random = np.random.default_rng(0)
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def add_tiny_pieces(
    writer: gguf.GGUFWriter, kind: str = "llama", *, gemma: bool = False, more_special: Sequence[str] = ()
) -> None:
    """Add a SentencePiece vocabulary: special tokens, bytes, then pieces with the better score the earlier."""
    types = gguf.TokenType
    special = ["<pad>", "</s>", "<s>", "<unk>"] if gemma else ["<unk>", "<s>", "</s>", *more_special]
    spaces = [
        piece.replace("▁", " ") if gemma and piece.strip("▁") == "" and len(piece) > 1 else piece for piece in PIECES
    ]
    words = special + [f"<0x{byte:02X}>" for byte in range(256)] + spaces + ["<think>"]
    kinds = [types.CONTROL] * len(special) + [types.BYTE] * 256
    kinds += [types.USER_DEFINED if piece.isspace() else types.NORMAL for piece in spaces] + [types.USER_DEFINED]
    writer.add_tokenizer_model(kind)
    writer.add_token_list(words)
    writer.add_token_scores([0.0] * (len(special) + 256) + [-float(i // 2) for i in range(len(PIECES))] + [0.0])
    writer.add_token_types(kinds)
    for role in ("bos", "eos", "unk"):
        getattr(writer, f"add_{role}_token_id")(words.index({"bos": "<s>", "eos": "</s>", "unk": "<unk>"}[role]))


def add_tiny_tokenizer(writer: gguf.GGUFWriter, folder: Path, *, pre: str | None = "gpt-2") -> None:
    """Add the tiny tokenizer, in the terms of GGUF."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(save_tiny_tokenizer(folder, vocab_size=VOCAB))
    words = tokenizer.convert_ids_to_tokens(list(range(VOCAB)))
    special = set(tokenizer.all_special_ids) | {1}
    kinds = [gguf.TokenType.CONTROL if index in special else gguf.TokenType.NORMAL for index in range(VOCAB)]
    writer.add_tokenizer_model("gpt2")
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(words)
    writer.add_token_types(kinds)
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(tokenizer.chat_template)
