"""Reads the tokenizers that transformers takes from tokenizer.json as they are, without its 100 MB.

It rebuilds others by code of its own, adds tokens that tokenizer_config.json names, and so on. Those, and
whatever is out of the ordinary, are not for this module: it gives None, and transformers reads the files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from forerun.models.folder import CONFIG_FILE
from forerun.models.tokenizer_parts import TokenizerParts

AS_IT_IS = "TokenizersBackend"  # transformers' class that takes tokenizer.json as it is
SAME = (AS_IT_IS, "PreTrainedTokenizerFast")
ALWAYS_AS_IT_IS = ("mistral", "olmo2", "phi3", "granite")  # model_types, whatever class their files name
UNLESS_NAMED = ("llama", "smollm3")  # model_types for which the class decides that the files name
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
EXTRA_TOKENS = ("additional_special_tokens", "extra_special_tokens")
UNUSUAL = ("auto_map", "fast_tokenizer_files", "fix_mistral_regex", "init_inputs", "model_specific_special_tokens")
FLAGS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")


def plain_tokenizer(folder: Path) -> TokenizerParts | None:
    """The tokenizer in a model folder; None: transformers has to read it."""
    try:
        content = (folder / "tokenizer.json").read_bytes()
        config, model = _read(folder / "tokenizer_config.json"), _read(folder / CONFIG_FILE)
        if not _takes_as_it_is(config, model, content) or (folder / "tekken.json").exists():
            return None
        if "added_tokens_decoder" not in config:
            if (folder / "added_tokens.json").exists():
                return None
            config |= _read(folder / "special_tokens_map.json")
        backend = Backend.from_buffer(content)
        if not _has_all_tokens(backend, config):
            return None
        special_tokens = {name: _text(config[name]) for name in SPECIAL_TOKENS if config.get(name) is not None}
        template = _chat_template(folder, config)
    except Exception:  # tokenizers raises just that; transformers will meet the same, and its message is shown
        return None
    return TokenizerParts(backend=backend, special_tokens=special_tokens, chat_template=template, kind=AS_IT_IS)


def _read(file: Path) -> dict[str, Any]:
    """A file's JSON object; empty if there is no file."""
    content = json.loads(file.read_bytes()) if file.exists() else {}
    return dict(content)


def _takes_as_it_is(config: Mapping[str, Any], model: Mapping[str, Any], content: bytes) -> bool:
    """Whether transformers would take tokenizer.json as it is."""
    if any(config.get(name) for name in (*UNUSUAL, "split_special_tokens")):
        return False
    named, model_type = config.get("tokenizer_class") or model.get("tokenizer_class"), model.get("model_type")
    if model_type in ALWAYS_AS_IT_IS:
        return True
    if model_type is not None and model_type not in UNLESS_NAMED:
        return False
    if named in ("LlamaTokenizer", "LlamaTokenizerFast"):
        return b'"ByteLevel"' in content  # else it is rebuilt as SentencePiece's
    return named in SAME or (named is None and model_type is not None)


def _has_all_tokens(backend: Backend, config: Mapping[str, Any]) -> bool:
    """Whether tokenizer.json has all tokens that the configuration adds, just as it has them."""
    added = {token_id: _flags(token) for token_id, token in backend.get_added_tokens_decoder().items()}
    listed = {int(i): _flags(AddedToken(**token)) for i, token in config.get("added_tokens_decoder", {}).items()}
    of_this_model = [name for name in config if name.endswith("_token") and name not in SPECIAL_TOKENS]
    if any(isinstance(config[name], (str, dict)) for name in of_this_model):
        return False  # templates may read them by their names, which transformers makes of them
    special = [config[name] for name in SPECIAL_TOKENS if config.get(name) is not None]
    for name in EXTRA_TOKENS:
        extra = config.get(name) or []
        if isinstance(extra, dict):
            return False
        special += extra
    contents = {flags["content"] for flags in added.values()}
    return listed.items() <= added.items() and contents.issuperset(map(_text, special))


def _flags(token: AddedToken) -> dict[str, Any]:
    return {name: getattr(token, name) for name in FLAGS}


def _text(token: str | Mapping[str, str]) -> str:
    """The text of a token that may be written with its flags."""
    return token if isinstance(token, str) else token["content"]


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | dict[str, str] | None:
    """Templates in files of their own come before those in the configuration."""
    files = {file.stem: file for file in (folder / "additional_chat_templates").glob("*.jinja")}
    if (folder / "chat_template.jinja").exists():
        files["default"] = folder / "chat_template.jinja"
    templates = {name: file.read_text(encoding="utf-8") for name, file in files.items()}
    if templates:
        return templates["default"] if templates.keys() == {"default"} else templates
    given: Any = config.get("chat_template")
    return {one["name"]: one["template"] for one in given} if isinstance(given, list) else given
