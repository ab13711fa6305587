"""Every error a user can cause, each one line: what is wrong, what was got, what may be, what to do."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable
from dataclasses import fields
from enum import StrEnum
from typing import Any, ClassVar, TypeVar

T = TypeVar("T")


class ErrorKind(StrEnum):
    """Who must change something where an error comes up while a request is served."""

    REQUEST = "request"  # the client: its request cannot be served
    SERVER = "server"  # the operator: the server, its settings or its model


class ForerunError(Exception):
    """A mistake that the user can mend; the CLI prints it on one line and exits with its `exit_code`."""

    kind: ClassVar[ErrorKind] = ErrorKind.SERVER
    exit_code: ClassVar[int] = 2

    def __init__(self, message: str) -> None:
        # what was got may be shown over several lines, as arrays are
        super().__init__(" ".join(line.strip() for line in message.splitlines()))


class ConfigError(ForerunError, ValueError):
    """An engine or speculative setting is unknown, out of range, or does not fit the others."""


class UnknownKeyError(ConfigError, TypeError):
    """A keyword or configuration key that does not exist."""

    kind = ErrorKind.REQUEST


class ModelError(ForerunError):
    """A model folder, its weights, its tokenizer or its architecture cannot be used."""


class RequestError(ForerunError, ValueError):
    """A prompt or a sampling value that this model cannot serve."""

    kind = ErrorKind.REQUEST


class DraftError(ForerunError):
    """A drafter, or what it proposed, does not fit the target."""


class StepError(ForerunError):
    """A step could not be computed, as its device's memory did not suffice; a request of it ends with this, and others go on."""


class WorkerError(ForerunError):
    """A process or a device that computes a part of the model is gone, so the engine can compute nothing more."""


class DeviceLostError(WorkerError):
    """The device computes no more, and this process cannot have it back: only a new one can."""

    exit_code = 3


class MemoryBudgetError(ForerunError):
    """The KV memory cannot hold even one sequence of the maximum length, or the machine cannot hold the KV memory."""


def did_you_mean(name: object, choices: Iterable[str]) -> str:
    """Return ``; did you mean 'x'?`` for the nearest of `choices`, else the list of all of them."""
    names = sorted(choices)
    near = difflib.get_close_matches(str(name), names, n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(names)}"


def refuse_unknown_keys(given: Iterable[object], allowed: Iterable[str], *, where: str) -> None:
    """Raise `UnknownKeyError` for the first of `given` that is not in `allowed`."""
    known = set(allowed)
    for key in given:
        if key not in known:
            raise UnknownKeyError(f"{where}: unknown key {key!r}{did_you_mean(key, known)}")


def strict_keywords(cls: type[T]) -> type[T]:
    """Make the dataclass name an unknown keyword and the one that was probably meant."""
    plain_init = cls.__init__
    known = [f.name for f in fields(cls) if f.init]  # type: ignore[arg-type]

    @functools.wraps(plain_init)
    def checked_init(self: T, *args: Any, **kwargs: Any) -> None:
        if args:
            raise UnknownKeyError(f"{cls.__name__}: got {args[0]!r:.80} without a name; must be name=value")
        refuse_unknown_keys(kwargs, known, where=cls.__name__)
        plain_init(self, **kwargs)

    setattr(cls, "__init__", checked_init)  # noqa: B010 - mypy refuses the plain assignment
    return cls


def one_line(error: BaseException) -> str:
    """The first line of an error's text, for an error of our own; its type if it has no text.

    A line that ends in a colon takes the next one with it; a mere key is shown with the type.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    if isinstance(error, KeyError):
        return f"KeyError: {lines[0]}"
    first = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return first.rstrip(".")
