"""A model's tokenizer: text to token ids and back, conversations by its chat template, and text as it grows.

What renders templates is imported where one is read: it takes three megabytes, and a text needs none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from forerun.errors import RequestError, one_line
from forerun.models.tokenizer_files import TokenizerParts, read_tokenizer
from forerun.models.vocabulary import Vocabulary, is_byte_level, read_vocabulary

if TYPE_CHECKING:
    from forerun.models.chat_template import Render

REPLACEMENT = "\ufffd"  # what bytes that are not (yet) UTF-8 decode to
CONTEXT_TOKENS = 5  # of the prompt, so that decoders see what the first new token follows
LONGEST_CHARACTER = 4  # bytes of one UTF-8 character, so at most as many tokens
LONG_TEXT = 4096  # characters or tokens; encoding or decoding these takes some ms
MOST_HELD_TOKENS = 16  # more without one whole character cannot be an incomplete one
OWN_ARGUMENTS = frozenset({"self", "chat_template", "continue_final_message", "render"})
"""Parameters of `Tokenizer.render_chat`, whose names no variable of a template can have."""


class Tokenizer:
    """A model's fast tokenizer. It neither pads, truncates nor cleans up texts."""

    def __init__(self, parts: TokenizerParts) -> None:
        self._parts = parts
        self._backend = parts.backend
        # tokenizer.json may have limits from training, which would cut prompts silently
        self._backend.no_truncation()
        self._backend.no_padding()
        added = self._backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._whole_texts: dict[int, str | None] | None = {} if is_byte_level(self._backend) else None

    @cached_property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; the model's logits may be wider."""
        size: int = self._backend.get_vocab_size(with_added_tokens=True)
        return size

    @property
    def bos_token_id(self) -> int | None:
        """The token that begins a text, or None."""
        return self._special_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a text, or None; a model may name others too, see `config_file.eos_token_ids`."""
        return self._special_id("eos_token")

    @property
    def tokens(self) -> dict[str, int]:
        """The id of each token by its string, in the tokenizer's own notation; added tokens included."""
        tokens: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        return tokens

    def id_of(self, token: str) -> int | None:
        """The id of a token by its string, without a table of all of them; None where there is none."""
        token_id: int | None = self._backend.token_to_id(token)
        return token_id

    def is_special(self, token: str) -> bool:
        """Whether a string is a special token, which answers show only on demand."""
        return self.id_of(token) in self.special_token_ids

    @cached_property
    def most_characters_per_token(self) -> int | None:
        """The characters of a text that a token stands for at most; None where that is not known.

        It is known of byte-level vocabularies whose tokenizers leave nothing out of a text.
        """
        before = self._backend.pre_tokenizer
        steps = "" if before is None else before.__getstate__().decode()
        swallows = any(token.lstrip or token.rstrip for token in self._backend.get_added_tokens_decoder().values())
        if self._backend.normalizer is not None or '"ByteLevel"' not in steps or '"Removed"' in steps or swallows:
            return None
        return max(map(len, self.tokens))  # a character of a token's notation is a byte

    @property
    def definition(self) -> str:
        """The content of its tokenizer.json, added tokens included."""
        text: str = self._backend.to_str()
        return text

    def vocabulary(self, vocab_size: int) -> Vocabulary:
        """Return what the tokens spell; ids from `vocab_size`, the width of the model's logits, on are left out.

        Raises:
            ModelError: the notation of the tokens is not known.
        """
        return read_vocabulary(
            self._backend,
            vocab_size=vocab_size,
            ends=self.eos_token_id,
            begins=self.bos_token_id,
            unknown=self._special_id("unk_token"),
        )

    @property
    def has_chat_template(self) -> bool:
        """Whether the model has a chat template of its own."""
        return bool(self._parts.chat_template)

    @property
    def kind(self) -> str:
        """The class that transformers would load."""
        return self._parts.kind

    @property
    def special_tokens(self) -> dict[str, str]:
        """The special tokens by their role: eos_token, bos_token, ..."""
        return dict(self._parts.special_tokens)

    @property
    def chat_template(self) -> str | Mapping[str, str] | None:
        """The chat template, several by their names in a few models, or None."""
        return self._parts.chat_template

    @property
    def template_variables(self) -> frozenset[str]:
        """The variables that the chat template reads besides messages and tools (enable_thinking, for one)."""
        return self.find_template_variables(None)

    def find_template_variables(self, chat_template: str | None) -> frozenset[str]:
        """Return the same of a template in place of the model's; None is the model's."""
        from forerun.models.chat_template import ARGUMENTS, variables_of

        try:
            template = self._template(chat_template, has_tools=False)
        except ValueError:
            return frozenset()
        return variables_of(template) - ARGUMENTS - OWN_ARGUMENTS - self.special_tokens.keys()

    @property
    def tool_template(self) -> str | None:
        """The template for conversations with tools, or None if it reads no tools."""
        return self.find_tool_template(None)

    def find_tool_template(self, chat_template: str | None, *, has_tools: bool = True) -> str | None:
        """Return the same for a template in place of the model's; None is the model's.

        Without `has_tools` it is the template for conversations that offer none, which may be another one.
        """
        from forerun.models.chat_template import variables_of

        try:
            template = self._template(chat_template, has_tools=has_tools)
        except ValueError:
            return None
        return template if "tools" in variables_of(template) else None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Encode a text; special tokens that are written out in it become special tokens.

        Raises:
            RequestError: `text` is not a string of Unicode characters.
        """
        try:
            if len(text) > LONG_TEXT:  # only the batch call releases the GIL
                return list(self._backend.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids)
            ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (TypeError, UnicodeError) as error:
            got = "half of a surrogate pair" if isinstance(text, str) else f"a {type(text).__name__}"
            raise RequestError(f"text: got {got}; must be a string of whole Unicode characters") from error
        return ids

    def stream(self, prompt_ids: Sequence[int], *, skip_special_tokens: bool = True) -> TextStream:
        """The text of what follows a prompt, token by token."""
        return TextStream(self, prompt_ids, skip_special_tokens=skip_special_tokens)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Decode token ids to exactly the text that they spell; bytes that are not UTF-8 become U+FFFD."""
        if len(ids) > LONG_TEXT:  # only the batch call releases the GIL
            long: str = self._backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0]
            return long
        text: str = self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def whole_text(self, token_id: int) -> str | None:
        """Return the text that a token adds to any text, or None where that depends on its neighbours.

        It depends on none in a byte-level vocabulary, if the token spells whole characters.
        """
        if self._whole_texts is None:
            return None
        if token_id not in self._whole_texts:
            text = self.token_text(token_id)
            self._whole_texts[token_id] = None if REPLACEMENT in text or not text else text
        return self._whole_texts[token_id]

    def token_text(self, token_id: int) -> str:
        """Decode one token alone, special or not."""
        return self.decode([token_id], skip_special_tokens=False)

    @overload
    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, tokenize: Literal[True] = True, **arguments: Any
    ) -> list[int]: ...

    @overload
    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, tokenize: Literal[False], **arguments: Any
    ) -> str: ...

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, tokenize: bool = True, **arguments: Any
    ) -> list[int] | str:
        """Render a conversation, see `render_chat`; as in transformers it is encoded unless `tokenize` is False."""
        text = self.render_chat(messages, **arguments)
        return self.encode_chat(text) if tokenize else text

    def encode_chat(self, text: str) -> list[int]:
        """Encode a conversation that a template has rendered: it writes special tokens out."""
        return self.encode(text, add_special_tokens=False)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        render: Render | None = None,
        **template_kwargs: Any,
    ) -> str:
        """Render a conversation with the model's chat template or the given one.

        `template_kwargs` are variables for the template (enable_thinking, for one). `render` runs the
        template: a function with the parameters of `chat_template.render`, which None stands for.

        Raises:
            RequestError: there is no template, or it refuses these messages.
        """
        from jinja2 import TemplateError

        from forerun.models import chat_template as templates

        if chat_template is None and not self.has_chat_template:
            raise RequestError("chat_template: this model has none; give one, or lay out the prompt and use generate")
        if add_generation_prompt and continue_final_message:
            raise RequestError(
                "continue_final_message: got True together with add_generation_prompt; set add_generation_prompt=False"
            )
        try:
            return (render or templates.render)(
                self._template(chat_template, has_tools=tools is not None),
                [dict(message) for message in messages],
                tools=None if tools is None else [dict(tool) for tool in tools],
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                variables=self.special_tokens | template_kwargs,
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

    def _template(self, given: str | None, *, has_tools: bool) -> str:
        """Return the template to use: the given one, which may be the name of one of the model's, or the model's."""
        own = self.chat_template
        if own is None or isinstance(own, str):
            return given or own or ""
        if given is not None:
            return own.get(given, given)
        name = "tool_use" if has_tools and "tool_use" in own else "default"
        if name not in own:
            raise ValueError(f"it has several and no default; name one of {', '.join(sorted(own))}")
        return own[name]

    def _special_id(self, name: str) -> int | None:
        """Return the id of a special token, or None."""
        token = self._parts.special_tokens.get(name)
        return None if token is None else self.id_of(token)


def load_tokenizer(path: Path) -> Tokenizer:
    """Load the tokenizer of a model folder or of a .gguf file; a folder's own files come before its GGUF's.

    Raises:
        ModelError: there is none, or it cannot be read.
    """
    return Tokenizer(read_tokenizer(path))


class TextStream:
    """Decodes a growing sequence of tokens, and returns text as soon as it is certain.

    It decodes a window of few tokens: those whose text was returned last, as context (decoders treat the
    first token of a text differently), and those since. Text that ends in U+FFFD may be the beginning of
    a character and is held back. More than `MOST_HELD_TOKENS` of such tokens are invalid bytes, which are
    returned except for the last few. Where nothing is held back, a token whose text depends on no other
    (`Tokenizer.whole_text`) is not decoded at all.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], *, skip_special_tokens: bool = True) -> None:
        """Begin after a prompt; its last character may be completed by the tokens to come."""
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        # [0, _num_context) of the window is context; its text up to `_given` has been returned (or is the prompt's)
        self._window = self._context(prompt_ids)
        self._num_context = len(self._window)
        self._given = self._text = self._decode()
        self._holds_nothing = not self._given.endswith(REPLACEMENT)

    def push(self, token_id: int) -> str:
        """Add a token; return the text that became certain with it, which may be empty."""
        if token_id in self._skipped:
            return ""
        if self._holds_nothing and (whole := self._tokenizer.whole_text(token_id)) is not None:
            self._window, self._num_context, self._given = [token_id], 1, whole
            self._text = whole
            return whole
        self._window.append(token_id)
        text = self._decode()
        if text and text == self._text and not text.endswith(REPLACEMENT):
            self._window.pop()  # it spells nothing, as ids beyond the vocabulary do
            return ""
        self._text = text
        num_certain = len(text.rstrip(REPLACEMENT))
        if len(self._window) - self._num_context > MOST_HELD_TOKENS:
            num_certain = max(num_certain, len(text) - LONGEST_CHARACTER + 1)
        if not text.startswith(self._given):  # the prompt ended within a character, which is whole now
            self._given = self._given.rstrip(REPLACEMENT)
        new = text[len(self._given) : num_certain]
        self._holds_nothing = bool(new) and num_certain == len(text)
        if new:
            self._slide(num_waiting=len(text) - num_certain)
        return new

    def _slide(self, *, num_waiting: int) -> None:
        """Make the tokens since the last slide the new context; the text's last characters still wait."""
        del self._window[: self._num_context]
        self._num_context = len(self._window)
        self._text = text = self._decode()
        self._given = text[: len(text) - num_waiting]

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=self._skip_special_tokens)

    def _context(self, prompt_ids: Sequence[int]) -> list[int]:
        """Return the last tokens of the prompt, beginning with a whole character where there is one near."""
        start = max(len(prompt_ids) - CONTEXT_TOKENS, 0)
        for earlier in range(start, max(start - LONGEST_CHARACTER, -1), -1):
            window = list(prompt_ids[earlier:])
            if not self._tokenizer.decode(window, skip_special_tokens=False).startswith(REPLACEMENT):
                return window
        return list(prompt_ids[start:])
