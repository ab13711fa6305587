"""A drafter class of the user's own."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from forerun.core.integers import check_integer
from forerun.drafters.base import Drafter, KeepsKV, LearnsFromTarget, TargetInfo
from forerun.errors import ConfigError, ForerunError, one_line

WHOLE = (KeepsKV, LearnsFromTarget)
"""What a drafter has all of or nothing: with a part of it nothing would be planned for it, and nobody would call it."""

COUNTS = ("num_candidates", "num_scratch_blocks", "kv_bytes_per_block", "scratch_bytes")
"""Numbers that such drafters have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomConfig:
    """A drafter class of the user's own, constructed with the `TargetInfo`."""

    drafter_class: type[Drafter]

    @property
    def default_num_speculative_tokens(self) -> int | None:
        """The user must say how many."""
        return None

    def build(self, target: TargetInfo) -> Drafter:
        """Make the drafter.

        Raises:
            ConfigError: its constructor fails, or it lacks a method, or a part of what it has a part of, or does not say which
                hidden states it needs.
        """
        make: Any = self.drafter_class
        name = self.drafter_class.__name__
        try:
            drafter: Drafter = make(target)
            _check(drafter, name)
        except ForerunError:
            raise
        except Exception as error:
            raise ConfigError(
                f"{name}: cannot be made ({type(error).__name__}: {one_line(error)}); it is called with the TargetInfo"
            ) from error
        return drafter


def _check(drafter: object, name: str) -> None:
    needs: object = getattr(drafter, "needs", None)
    if not isinstance(needs, frozenset) or not all(isinstance(state, str) for state in needs):
        raise ConfigError(
            f"{name}.needs: got {needs!r:.80}; must be a frozenset of names of hidden states, such as "
            "frozenset({'last_hidden'}), or frozenset() where it reads none"
        )
    methods = _methods(Drafter)
    for method in methods:
        if not callable(getattr(drafter, method, None)):
            raise ConfigError(f"{name}.{method}: there is no such method; a drafter has {', '.join(methods)}")
    for protocol in WHOLE:
        parts = [*inspect.get_annotations(protocol), *_methods(protocol)]
        missing = [part for part in parts if not hasattr(drafter, part)]
        if 0 < len(missing) < len(parts):
            raise ConfigError(
                f"{name}: has no {', '.join(missing)}; {protocol.__name__} is {', '.join(parts)}; add what is missing, or leave out "
                "the rest"
            )
    for count in COUNTS:
        check_integer(f"{name}.{count}", getattr(drafter, count, 0), least=0, do="mend the class")


def _methods(protocol: type) -> list[str]:
    """The names of a protocol's methods, in their order."""
    return [name for name in vars(protocol) if not name.startswith("_")]
