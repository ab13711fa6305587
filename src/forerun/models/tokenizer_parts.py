"""What a tokenizer is made of, read from a model's files or taken from transformers' own object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer as Backend

from forerun.errors import ModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerParts:
    """The tokenizer itself, its special tokens by their part (eos_token, bos_token, ...), and chat templates.

    `chat_template` is one text, several by their names, or None; `kind` the name that transformers has
    for such a tokenizer.
    """

    backend: Backend
    special_tokens: Mapping[str, str]
    chat_template: str | Mapping[str, str] | None
    kind: str


def parts_of(fast_tokenizer: Any) -> TokenizerParts:
    """The parts of a transformers tokenizer.

    Raises:
        ModelError: it is one of transformers' slow ones.
    """
    kind = type(fast_tokenizer).__name__
    if not fast_tokenizer.is_fast:
        raise ModelError(
            f"tokenizer {kind}: got one without tokenizer.json; must be a fast tokenizer; "
            "convert it with transformers (AutoTokenizer.from_pretrained(...).save_pretrained)"
        )
    return TokenizerParts(
        backend=fast_tokenizer.backend_tokenizer,
        special_tokens={name: str(token) for name, token in fast_tokenizer.special_tokens_map.items()},
        chat_template=fast_tokenizer.chat_template,
        kind=kind,
    )
