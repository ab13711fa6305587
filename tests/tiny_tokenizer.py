"""A tokenizer small enough for tests: every byte is a token, then a few merges and special tokens."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

MIN_VOCAB_SIZE = 260
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = (("h", "e"),)  # one multi-byte token, so that token and byte are not the same thing
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def save_tiny_tokenizer(
    folder: Path | str, *, vocab_size: int = 264, chat_template: str | None = CHAT_TEMPLATE
) -> Path:
    """Write a byte-level BPE tokenizer of `vocab_size` ids to `folder`, with a ChatML template.

    Ids: 0 <|endoftext|> (bos and pad), 1 <|im_start|>, 2 <|im_end|> (eos); 3 to 258 the bytes in
    the order of `pre_tokenizers.ByteLevel.alphabet()` sorted; 259 "he"; the rest are unused words,
    so that every id below `vocab_size` decodes. generation_config.json lists 2 as eos.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise ValueError(f"vocab_size: got {vocab_size}; must be {MIN_VOCAB_SIZE} or more")
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=_byte_level_bpe(vocab_size),
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = chat_template
    fast.save_pretrained(path)
    generation = {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 0}
    (path / "generation_config.json").write_text(json.dumps(generation))
    return path


def _byte_level_bpe(vocab_size: int) -> Tokenizer:
    """The tokenizer itself: specials, bytes, merges, unused words."""
    words = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in MERGES)]
    words += [f"unused{index}" for index in range(len(words), vocab_size)]
    vocab = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(MERGES)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in SPECIAL_TOKENS])
    return tokenizer
