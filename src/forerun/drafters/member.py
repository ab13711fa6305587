"""One drafter among several: what it may draft, and when its draft is good enough."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from forerun.drafters.base import DrafterConfig
from forerun.errors import ForerunError

DEFAULT_MIN_DRAFT_TOKENS = 2
"""A copy that long expects about one token to stand: what a small model's draft gains once its passes are paid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberConfig:
    """A drafter's settings, and its place among the others.

    It drafts at most `num_speculative_tokens`. A draft that is `min_draft_tokens` deep, or as deep
    as its request allows, is good enough to ask nobody else.
    """

    method: str
    drafter: DrafterConfig
    num_speculative_tokens: int
    min_draft_tokens: int


@contextmanager
def naming_member(number: int) -> Iterator[None]:
    """Let an error say which drafter of the list has it."""
    try:
        yield
    except ForerunError as error:
        what = str(error).removeprefix("speculative_config: ")
        raise type(error)(f"speculative_config: drafters[{number}]: {what}") from error
