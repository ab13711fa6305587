"""What conversations the target is to have: with the prompts of a file, or with a user whose part it writes itself."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from forerun.errors import ConfigError
from forerun.models.tokenizer import Tokenizer
from forerun.train.openings import draw_opening

TEMPERATURES = (0.0, 0.7, 1.0)
"""Of the answers; conversations take turns."""

TURN_COUNTS = (1, 1, 1, 2, 3)
"""How many questions an invented conversation has: one of these, each as likely."""

ROLES = ("system", "user", "assistant")
"""Of the messages of a conversation in a file."""

USER, ANSWER, NEXT = "FIRST_QUESTION_HERE", "ANSWER_HERE", "NEXT_QUESTION_HERE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One conversation before it is had.

    Attributes:
        number: its number in the run.
        questions: the user's messages in order; None is invented by the model.
        temperature: of the answers.
        opening: words with which the first question begins, if it is invented.
        system: the system message, or None for the template's own.
    """

    number: int
    questions: tuple[str | None, ...]
    temperature: float
    opening: str = ""
    system: str | None = None


class Plans(Protocol):
    """The conversations of a run, each a function of its number alone."""

    @property
    def count(self) -> int | None:
        """How many there are; None: as many as there is time for."""
        ...

    @property
    def system(self) -> str | None:
        """A system message of theirs; None where there is none."""
        ...

    def plan(self, number: int) -> Plan:
        """Conversation `number`, counted from 0."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class InventedConversations:
    """Conversations in which the model writes both parts (Magpie, arXiv 2406.08464)."""

    count: int | None
    seed: int

    @property
    def system(self) -> str | None:
        """See `Plans`."""
        return None

    def plan(self, number: int) -> Plan:
        """See `Plans`."""
        chance = random.Random(f"conversation {self.seed} {number}")
        return Plan(
            number=number,
            questions=(None,) * chance.choice(TURN_COUNTS),
            temperature=TEMPERATURES[number % len(TEMPERATURES)],
            opening=draw_opening(chance),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenConversations:
    """The conversations of a file of prompts."""

    prompts: Sequence[tuple[str | None, tuple[str, ...]]]  # system message, the user's messages

    @property
    def count(self) -> int | None:
        """See `Plans`."""
        return len(self.prompts)

    @property
    def system(self) -> str | None:
        """See `Plans`."""
        return next((system for system, _ in self.prompts if system is not None), None)

    def plan(self, number: int) -> Plan:
        """See `Plans`."""
        system, questions = self.prompts[number]
        temperature = TEMPERATURES[number % len(TEMPERATURES)]
        return Plan(number=number, questions=questions, temperature=temperature, system=system)


def read_conversations(path: Path) -> GivenConversations:
    """Read prompts: JSON lines with a text under "prompt", texts under "turns" or messages under "messages", or a .txt file.

    The assistant's messages are left out, since the target writes its own.

    Raises:
        ConfigError: the file cannot be read or is empty, or a line is in another form or no Unicode text; the first such
            line is named.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # splitlines would cut texts at U+2028 too
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts: cannot read {path} ({error}); give a .jsonl or .txt file") from None
    parse = _of_text if path.suffix == ".txt" else _of_json
    prompts = [parse(line, f"{path}, line {i}") for i, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise ConfigError(f"--prompts: {path} is empty; write one prompt per line")
    return GivenConversations(prompts=prompts)


def _of_text(line: str, _where: str) -> tuple[str | None, tuple[str, ...]]:
    return None, (line,)


def _of_json(line: str, where: str) -> tuple[str | None, tuple[str, ...]]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"--prompts: {where} is not JSON ({error}); write one object per line") from None
    found = _parts(record) if isinstance(record, Mapping) else None
    if found is None:
        raise ConfigError(
            f'--prompts: {where} must be an object with a text under "prompt", a list of texts under "turns", or of '
            f'{{"role": ..., "content": ...}} under "messages", of system, user and assistant, with one of the user; '
            f"got {line:.60}"
        )
    system, questions = found
    try:
        "".join((system or "", *questions)).encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"--prompts: {where} has half of a surrogate pair ({error}); write whole Unicode characters"
        ) from None
    return found


def _parts(record: Mapping[str, Any]) -> tuple[str | None, tuple[str, ...]] | None:
    """The system message and the user's, or None if there are none."""
    if isinstance(record.get("prompt"), str):
        return (None, (record["prompt"],)) if record["prompt"].strip() else None
    if isinstance(record.get("turns"), list):
        turns = record["turns"]
        return (None, tuple(turns)) if _are_questions(turns) else None
    messages = record.get("messages")
    if not isinstance(messages, list) or not all(_is_message(message) for message in messages):
        return None
    of_role = {
        role: [message["content"] for message in messages if message["role"] == role] for role in ("system", "user")
    }
    return ("\n\n".join(of_role["system"]) or None, tuple(of_role["user"])) if _are_questions(of_role["user"]) else None


def _are_questions(values: Sequence[Any]) -> bool:
    return bool(values) and all(isinstance(value, str) and value.strip() for value in values)


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and value.get("role") in ROLES and isinstance(value.get("content"), str)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMarks:
    """What a chat template writes around the messages of a conversation.

    Attributes:
        begin: before the first question; it ends with the mark of the user's turn.
        answer: from a question to its answer.
        following: from an answer to the next question; it begins with what ends an answer.
    """

    begin: str
    answer: str
    following: str

    @classmethod
    def read(cls, tokenizer: Tokenizer, *, system: str | None = None) -> ChatMarks:
        """Find the marks of a model's chat template.

        Raises:
            ConfigError: there is no template, or it does not mark the user's turn.
        """
        before = [] if system is None else [{"role": "system", "content": system}]
        messages = [
            *before,
            {"role": "user", "content": USER},
            {"role": "assistant", "content": ANSWER},
            {"role": "user", "content": NEXT},
        ]
        if not tokenizer.has_chat_template:
            raise ConfigError("model: has no chat template, so nobody can tell what it answers; give a chat model")
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        text = tokenizer.decode(ids, skip_special_tokens=False)
        if any(text.count(word) != 1 for word in (USER, ANSWER, NEXT)):
            raise ConfigError(
                "model: its chat template does not write each message once, so its user mark cannot be told; use another model"
            )
        begin, rest = text.split(USER)
        answer, rest = rest.split(ANSWER)
        following, last = rest.split(NEXT)
        if not begin.strip() or last != answer:
            raise ConfigError(
                "model: its chat template does not mark the user's turns as it does the first; no prompts can be invented"
            )
        return cls(begin=begin, answer=answer, following=following)
