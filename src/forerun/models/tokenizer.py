"""Text to token ids and back: a model's own tokenizer, its chat template, and text as it grows."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, pass_context
from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from forerun.errors import ModelError, RequestError
from forerun.models.gguf import find_gguf, gguf_source
from forerun.models.quiet import one_line, quiet_transformers
from forerun.models.vocabulary import Vocabulary, read_vocabulary

REPLACEMENT = "\ufffd"  # what bytes that are not (yet) UTF-8 decode to
CONTEXT_TOKENS = 5  # of the prompt, so that decoders see what the first new token follows
LONGEST_CHARACTER = 4  # bytes of one UTF-8 character, so at most as many tokens
LONG_TEXT = 4096  # characters; encoding these takes some ms
MOST_HELD_TOKENS = 16  # more without one whole character cannot be an incomplete one
TEMPLATE_GLOBALS = frozenset(
    {
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "raise_exception",
        "strftime_now",
        "namespace",
        "range",
        "dict",
    }
)
TEMPLATE_ARGUMENTS = frozenset(
    {"chat_template", "continue_final_message", "conversations", "render", "return_assistant_tokens_mask", "self"}
)  # what a template's variables cannot be called, for they are given beside these
TRACKING_TAG = re.compile(r"{%-?\s*(end)?generation\s*-?%}")  # transformers' own; jinja does not know it
Render = Callable[[Mapping[str, Any]], str]
VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


@pass_context
def _unfolded(*_args: Any) -> Any:
    """In the place of each filter: one that needs its context, and so is not called before there is one."""


class _Reader(ImmutableSandboxedEnvironment):
    """Reads templates without working out what is constant in them, which may take any time and memory."""

    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)
    intercepted_unops = frozenset(ImmutableSandboxedEnvironment.default_unop_table)

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.filters = dict.fromkeys(self.filters, _unfolded)


class Tokenizer:
    """A model's fast tokenizer. Texts are neither padded, truncated nor tidied."""

    def __init__(self, fast_tokenizer: Any) -> None:
        """Wrap a transformers fast tokenizer.

        Raises:
            ModelError: the tokenizer is one of transformers' slow ones.
        """
        if not fast_tokenizer.is_fast:
            raise ModelError(
                f"tokenizer {type(fast_tokenizer).__name__}: got one without tokenizer.json; must be a fast tokenizer; "
                "convert it with transformers (AutoTokenizer.from_pretrained(...).save_pretrained)"
            )
        self._transformers = fast_tokenizer
        self._backend = fast_tokenizer.backend_tokenizer
        # tokenizer.json may carry limits from training, which would cut prompts in silence
        self._backend.no_truncation()
        self._backend.no_padding()
        added = self._backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(token_id for token_id, token in added.items() if token.special)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; the model's logits may be wider."""
        return len(self._transformers)

    @property
    def bos_token_id(self) -> int | None:
        """The token that begins a text, if there is one."""
        token_id: int | None = self._transformers.bos_token_id
        return token_id

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a text; a model may stop at others too, see `loader.eos_token_ids`."""
        token_id: int | None = self._transformers.eos_token_id
        return token_id

    @property
    def tokens(self) -> dict[str, int]:
        """The id of each token by its string, in the tokenizer's own notation; added tokens included."""
        tokens: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        return tokens

    @property
    def definition(self) -> str:
        """The tokenizer as the text of its tokenizer.json, added tokens included."""
        text: str = self._backend.to_str()
        return text

    def vocabulary(self, vocab_size: int) -> Vocabulary:
        """What the tokens spell; ids from `vocab_size`, the width of the model's logits, on are left out.

        Raises:
            ModelError: the tokens are written in a notation that is not known.
        """
        return read_vocabulary(
            self._backend,
            vocab_size=vocab_size,
            ends=self.eos_token_id,
            begins=self.bos_token_id,
            unknown=self._transformers.unk_token_id,
        )

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be laid out without giving a template."""
        return bool(self._transformers.chat_template)

    @property
    def kind(self) -> str:
        """The name that transformers has for it."""
        return type(self._transformers).__name__

    @property
    def special_tokens(self) -> dict[str, str]:
        """The special tokens by their part: eos_token, bos_token, ..."""
        return {name: str(token) for name, token in self._transformers.special_tokens_map.items()}

    @property
    def chat_template(self) -> str | None:
        """The template that conversations are laid out by, if there is one."""
        template: str | None = self._transformers.chat_template
        return template

    @property
    def template_variables(self) -> frozenset[str]:
        """What the chat template reads besides messages and tools (enable_thinking, for one)."""
        if not isinstance(self.chat_template, str):
            return frozenset()
        special = self._transformers.special_tokens_map
        return frozenset(_variables(self.chat_template) - TEMPLATE_GLOBALS - TEMPLATE_ARGUMENTS - special.keys())

    @property
    def tool_template(self) -> str | None:
        """The template that conversations with tools are laid out by; None if it reads no tools.

        Of several by name, transformers takes "tool_use" there.
        """
        named = self._transformers.chat_template
        template = named.get("tool_use", named.get("default")) if isinstance(named, dict) else named
        return template if template and "tools" in _variables(template) else None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; special tokens written out in it count as such.

        Raises:
            RequestError: `text` is not a string of Unicode characters.
        """
        try:
            if len(text) > LONG_TEXT:  # only the batch call lets other threads run meanwhile
                return list(self._backend.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids)
            ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (TypeError, UnicodeError) as error:
            got = "half of a surrogate pair" if isinstance(text, str) else f"a {type(text).__name__}"
            raise RequestError(f"text: got {got}; must be a string of whole Unicode characters") from error
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids, exactly as the tokens spell it; bytes that are not UTF-8 become U+FFFD."""
        text: str = self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def token_text(self, token_id: int) -> str:
        """The text of one token alone, special or not."""
        return self.decode([token_id], skip_special_tokens=False)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        render: Render | None = None,
        **template_kwargs: Any,
    ) -> list[int]:
        """Token ids of a conversation, laid out by the model's chat template or the one given.

        `template_kwargs` are variables for the template (enable_thinking, for one). `render` runs the
        template, as transformers' `render_jinja_template` does and by default that.

        Raises:
            RequestError: there is no template, or it refuses these messages.
        """
        if chat_template is None and not self.has_chat_template:
            raise RequestError("chat_template: this model has none; give one, or lay out the prompt and use generate")
        if add_generation_prompt and continue_final_message:
            raise RequestError(
                "continue_final_message: got True together with add_generation_prompt; set add_generation_prompt=False"
            )
        try:
            text = (render or _render)(
                {
                    "conversations": [[_without_nulls(message) for message in messages]],
                    "tools": None if tools is None else [dict(tool) for tool in tools],
                    "chat_template": self._transformers.get_chat_template(chat_template, tools),
                    "continue_final_message": continue_final_message,
                    "add_generation_prompt": add_generation_prompt,
                    **self._transformers.special_tokens_map,
                    **template_kwargs,
                }
            )
        except (
            TemplateError,
            ArithmeticError,
            AttributeError,
            LookupError,
            RecursionError,
            TypeError,
            ValueError,
        ) as error:
            raise RequestError(f"messages: the chat template refuses them ({one_line(error)})") from error
        return self.encode(text, add_special_tokens=False)  # the template writes them out


def _render(arguments: Mapping[str, Any]) -> str:
    """A conversation's text, by its template."""
    rendered: Any = render_jinja_template(**arguments)  # texts, and what in them is the assistant's
    text: str = rendered[0][0]
    return text


def _without_nulls(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message without fields that are null, which many templates would write out."""
    return {name: value for name, value in message.items() if value is not None}


def has_tokenizer(path: Path) -> bool:
    """Whether there is a tokenizer in a model folder, or it is or holds a .gguf file, which brings one."""
    return any((path / name).exists() for name in VOCABULARY_FILES) or find_gguf(path) is not None


def load_tokenizer(path: Path) -> Tokenizer:
    """Load the tokenizer of a model folder or of a .gguf file; a folder's own files come before its GGUF's.

    Raises:
        ModelError: there is none, or it cannot be read.
    """
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
    return Tokenizer(fast_tokenizer)


def _source(path: Path) -> dict[str, Any]:
    """Arguments by which transformers' `from_pretrained` finds the tokenizer.

    Checked here, as transformers would make up an empty tokenizer where only config.json is found.
    """
    if any((path / name).exists() for name in VOCABULARY_FILES):
        return {"pretrained_model_name_or_path": str(path.absolute()), "local_files_only": True}
    gguf = find_gguf(path)
    if gguf is not None:
        return gguf_source(gguf)
    if not path.is_dir():
        raise ModelError(f"{path}: there is no such folder; check the path")
    raise ModelError(
        f"{path}: no tokenizer; must hold tokenizer.json (with tokenizer_config.json); copy them from the original model"
    )


def _broken_file(folder: Path) -> str | None:
    """The tokenizer file in `folder` that is not JSON, if one is not."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        file = folder / name
        if not file.exists():
            continue
        try:
            json.loads(file.read_bytes())
        except ValueError:
            return f"{name} is not JSON"
    return None


def _variables(template: str) -> set[str]:
    """What a template reads."""
    try:
        plain = TRACKING_TAG.sub("", template)
        return find_undeclared_variables(_Reader(extensions=["jinja2.ext.loopcontrols"]).parse(plain))
    except (TemplateError, RecursionError):
        return set()


class TextStream:
    """Text of a growing sequence of tokens, handed out as soon as it is certain.

    Decodes a window of few tokens: those whose text was handed out last, as context (decoders treat
    the first token of a text differently), and those since. Text that ends in U+FFFD may be the
    beginning of a character and waits; more than `MOST_HELD_TOKENS` of it are invalid bytes, which
    are handed out but for the last few.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], *, skip_special_tokens: bool = True) -> None:
        """Begin after a prompt; its last character may be completed by the tokens to come."""
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        # [0, _num_context) of the window is context; its text up to `_given` is handed out (or the prompt's)
        self._window = self._context(prompt_ids)
        self._num_context = len(self._window)
        self._given = self._decode()

    def push(self, token_id: int) -> str:
        """Add a token; return the text that became certain with it, which may be empty."""
        if token_id in self._skipped:
            return ""
        self._window.append(token_id)
        text = self._decode()
        num_certain = len(text.rstrip(REPLACEMENT))
        if len(self._window) - self._num_context > MOST_HELD_TOKENS:
            num_certain = max(num_certain, len(text) - LONGEST_CHARACTER + 1)
        if not text.startswith(self._given):  # the prompt ended within a character, which is whole now
            self._given = self._given.rstrip(REPLACEMENT)
        new = text[len(self._given) : num_certain]
        if new:
            self._slide(num_waiting=len(text) - num_certain)
        return new

    def _slide(self, *, num_waiting: int) -> None:
        """Make the tokens since the last slide the new context; the text's last characters still wait."""
        del self._window[: self._num_context]
        self._num_context = len(self._window)
        text = self._decode()
        self._given = text[: len(text) - num_waiting]

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=self._skip_special_tokens)

    def _context(self, prompt_ids: Sequence[int]) -> list[int]:
        """The last tokens of the prompt, beginning with a whole character where there is one near."""
        start = max(len(prompt_ids) - CONTEXT_TOKENS, 0)
        for earlier in range(start, max(start - LONGEST_CHARACTER, -1), -1):
            window = list(prompt_ids[earlier:])
            if not self._tokenizer.decode(window, skip_special_tokens=False).startswith(REPLACEMENT):
                return window
        return list(prompt_ids[start:])
