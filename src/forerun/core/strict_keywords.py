"""Dataclasses of a user's settings: built from keywords alone, and strict about their names."""

from __future__ import annotations

import functools
from dataclasses import fields
from typing import Any, TypeVar

from forerun.errors import UnknownKeyError, refuse_unknown_keys

T = TypeVar("T")


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
