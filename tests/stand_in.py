"""A tiny random chat model in the place of the default one."""

from __future__ import annotations

from pathlib import Path

from forerun.models import store
from tests.tiny_models import save_tiny_model
from tests.tiny_tokenizer import save_tiny_tokenizer

VOCAB_SIZE = 264
NAME = "smollm2-135m"


def save_stand_in(folder):
    """Write a tiny chat model to `folder`."""
    save_tiny_model(folder, "LlamaForCausalLM", seed=3, vocab_size=VOCAB_SIZE, max_position_embeddings=1024)
    save_tiny_tokenizer(folder, vocab_size=VOCAB_SIZE)
    return folder


def make_stand_in_cache(cache):
    """Fill the cache folder so that the default model's name leads to the tiny model."""
    folder = Path(cache) / "models" / NAME
    folder.mkdir(parents=True)
    save_stand_in(folder)
    store._write_manifest(folder, NAME, store.KNOWN_MODELS[NAME])
