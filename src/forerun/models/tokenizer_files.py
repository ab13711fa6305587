"""Reads a model's tokenizer: without transformers where it takes tokenizer.json as it is stored, else with it.

Importing transformers takes 100 MB and seconds. It rebuilds some tokenizers by code of its own, adds tokens
that tokenizer_config.json names, and so on: those, and all unusual files, it has to read itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from forerun.errors import ModelError, one_line
from forerun.models.families import MODEL_TYPES, TokenizerJson
from forerun.models.model_folder import CONFIG_FILE, find_gguf
from forerun.models.transformers_logging import quiet_transformers

TOKENIZER_FILE = "tokenizer.json"
VOCABULARY_FILES = (TOKENIZER_FILE, "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
AS_STORED_CLASS = "TokenizersBackend"  # transformers' class that takes tokenizer.json as it is stored
AS_STORED_CLASSES = (AS_STORED_CLASS, "PreTrainedTokenizerFast")
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
EXTRA_TOKENS = ("additional_special_tokens", "extra_special_tokens")
UNUSUAL = ("auto_map", "fast_tokenizer_files", "fix_mistral_regex", "init_inputs", "model_specific_special_tokens")
FLAGS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerParts:
    """What a tokenizer is made of.

    Attributes:
        backend: turns text to ids and back.
        special_tokens: by their role (eos_token, bos_token, ...).
        chat_template: one text, several by their names, or None.
        kind: the class that transformers would load.
    """

    backend: Backend
    special_tokens: Mapping[str, str]
    chat_template: str | Mapping[str, str] | None
    kind: str


_READ_AHEAD: dict[Path, TokenizerParts | None] = {}
"""By their folder, what `read_ahead` has read and `read_tokenizer` has not asked for yet."""


def read_ahead(folder: Path) -> None:
    """Read a folder's tokenizer for the next `read_tokenizer`, as far as that needs no transformers.

    Python has a tenth of a second for it at a start, while the libraries of torch are being opened.
    """
    if (folder / TOKENIZER_FILE).is_file():
        _READ_AHEAD[folder] = tokenizer_without_transformers(folder)


def has_tokenizer(path: Path) -> bool:
    """Return whether a model folder has a tokenizer, or `path` is or holds a .gguf file, which contains one."""
    return _has_vocabulary(path) or find_gguf(path) is not None


def is_built_from_gguf(path: Path) -> bool:
    """Return whether a model's tokenizer is built from its GGUF file, which takes a second where vocabularies are large.

    Raises:
        ModelError: the file's tokenizer cannot be built.
    """
    gguf = None if _has_vocabulary(path) else find_gguf(path)
    if gguf is None:
        return False
    from forerun.models.gguf.file import open_gguf
    from forerun.models.gguf.tokenizer import check_tokenizer

    check_tokenizer(open_gguf(gguf))
    return True


def read_tokenizer(path: Path) -> TokenizerParts:
    """Read the tokenizer of a model folder or of a .gguf file; a folder's own files come before its GGUF's.

    Raises:
        ModelError: there is none, or it cannot be read.
    """
    gguf = None if _has_vocabulary(path) else find_gguf(path)
    if gguf is not None:
        return _gguf_tokenizer(gguf)
    parts = _READ_AHEAD.pop(path) if path in _READ_AHEAD else tokenizer_without_transformers(path)
    return parts if parts is not None else _tokenizer_with_transformers(path)


def _has_vocabulary(folder: Path) -> bool:
    return any((folder / name).exists() for name in VOCABULARY_FILES)


def _gguf_tokenizer(gguf: Path) -> TokenizerParts:
    from forerun.models.gguf.file import open_gguf
    from forerun.models.gguf.tokenizer import build_tokenizer, chat_template
    from forerun.ops.native.memory import give_back_freed_memory

    file = open_gguf(gguf)
    backend, special_tokens = build_tokenizer(file)
    give_back_freed_memory()  # of what it was built from
    return TokenizerParts(
        backend=backend, special_tokens=special_tokens, chat_template=chat_template(file), kind=AS_STORED_CLASS
    )


def tokenizer_without_transformers(folder: Path) -> TokenizerParts | None:
    """Read the tokenizer of a model folder, or return None if transformers has to read it."""
    try:
        content = (folder / TOKENIZER_FILE).read_bytes()
        config, model = _read(folder / "tokenizer_config.json"), _read(folder / CONFIG_FILE)
        if not _is_taken_as_stored(config, model, content) or (folder / "tekken.json").exists():
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
    except Exception:  # tokenizers raises no narrower type; transformers will fail too, and its message is shown
        return None
    return TokenizerParts(backend=backend, special_tokens=special_tokens, chat_template=template, kind=AS_STORED_CLASS)


def _read(file: Path) -> dict[str, Any]:
    """Read a file's JSON object; empty if there is no file."""
    content = json.loads(file.read_bytes()) if file.exists() else {}
    return dict(content)


def _is_taken_as_stored(config: Mapping[str, Any], model: Mapping[str, Any], content: bytes) -> bool:
    """Return whether transformers would take tokenizer.json as it is stored."""
    if any(config.get(name) for name in (*UNUSUAL, "split_special_tokens")):
        return False
    named, model_type = config.get("tokenizer_class") or model.get("tokenizer_class"), model.get("model_type")
    if model_type is not None:
        family = MODEL_TYPES.get(model_type)
        if family is None or family.tokenizer_json is TokenizerJson.REBUILT:
            return False
        if family.tokenizer_json is TokenizerJson.AS_STORED:
            return True
    if named in ("LlamaTokenizer", "LlamaTokenizerFast"):
        return b'"ByteLevel"' in content  # else it is rebuilt as SentencePiece's
    return named in AS_STORED_CLASSES or (named is None and model_type is not None)


def _has_all_tokens(backend: Backend, config: Mapping[str, Any]) -> bool:
    """Return whether tokenizer.json has all tokens that the configuration adds, with the same flags."""
    added = {token_id: _flags(token) for token_id, token in backend.get_added_tokens_decoder().items()}
    listed = {int(i): _flags(AddedToken(**token)) for i, token in config.get("added_tokens_decoder", {}).items()}
    of_this_model = [name for name in config if name.endswith("_token") and name not in SPECIAL_TOKENS]
    if any(isinstance(config[name], (str, dict)) for name in of_this_model):
        return False  # transformers makes variables of them, which templates may read
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
    """Return the text of a token, which may be stored with its flags."""
    return token if isinstance(token, str) else token["content"]


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | dict[str, str] | None:
    """Read the chat templates: those in files of their own come before those in the configuration."""
    files = {file.stem: file for file in (folder / "additional_chat_templates").glob("*.jinja")}
    if (folder / "chat_template.jinja").exists():
        files["default"] = folder / "chat_template.jinja"
    templates = {name: file.read_text(encoding="utf-8") for name, file in files.items()}
    if templates:
        return templates["default"] if templates.keys() == {"default"} else templates
    given: Any = config.get("chat_template")
    return {one["name"]: one["template"] for one in given} if isinstance(given, list) else given


def _tokenizer_with_transformers(path: Path) -> TokenizerParts:
    from transformers import AutoTokenizer  # here, for it takes 100 MB

    source = _source(path)
    try:
        with quiet_transformers():
            fast_tokenizer = AutoTokenizer.from_pretrained(**source, trust_remote_code=False)
    except Exception as error:
        reason = _broken_file(path) or one_line(error)
        raise ModelError(
            f"{path}: the tokenizer cannot be loaded ({reason}); copy tokenizer.json and tokenizer_config.json "
            "from the original model"
        ) from error
    return parts_of(fast_tokenizer)


def _source(path: Path) -> dict[str, Any]:
    """Return the arguments by which transformers' `from_pretrained` finds the tokenizer.

    They are checked here: transformers would make up an empty tokenizer where it finds only config.json.
    """
    if _has_vocabulary(path):
        return {"pretrained_model_name_or_path": str(path.absolute()), "local_files_only": True}
    if not path.is_dir():
        raise ModelError(f"{path}: there is no such folder; check the path")
    raise ModelError(
        f"{path}: no tokenizer; must hold tokenizer.json (with tokenizer_config.json); copy them from the original model"
    )


def _broken_file(folder: Path) -> str | None:
    """Return which tokenizer file in `folder` is not JSON, or None."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        file = folder / name
        if not file.exists():
            continue
        try:
            json.loads(file.read_bytes())
        except ValueError:
            return f"{name} is not JSON"
    return None


def parts_of(fast_tokenizer: Any) -> TokenizerParts:
    """Take a transformers tokenizer apart.

    Raises:
        ModelError: it is one of transformers' slow tokenizers.
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
