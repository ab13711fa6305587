"""The drafters of a hybrid: each of them a small `speculative_config`, checked and resolved like a large one."""

from __future__ import annotations

from typing import Any

from forerun.config.drafter_config import read_keys, resolve_drafter
from forerun.drafters.member import DEFAULT_MIN_DRAFT_TOKENS, MemberConfig, naming_member
from forerun.errors import ConfigError, UnknownKeyError
from forerun.verify.registry import VERIFIER_KEYS

_KEYS_OF_ALL = (*VERIFIER_KEYS, "num_speculative_tokens_per_batch_size")


def resolve_members(given: Any, *, most: int) -> tuple[MemberConfig, ...]:
    """Resolve the list of dicts under "drafters", for drafts of at most `most` tokens.

    Raises:
        ConfigError: it is no list, or one of the dicts is wrong; the error says which.
    """
    if not isinstance(given, (list, tuple)):
        raise ConfigError(f"speculative_config: drafters: got {given!r}; must be a list of dicts, one per drafter")
    members = []
    for number, keys in enumerate(given):
        with naming_member(number):
            members.append(_member(read_keys(keys), most=most, is_last=number == len(given) - 1))
    return tuple(members)


def _member(keys: dict[str, Any], *, most: int, is_last: bool) -> MemberConfig:
    _refuse_misplaced(keys, is_last=is_last)
    method, drafter = resolve_drafter(keys, other_keys=("num_speculative_tokens", "min_draft_tokens"))
    num_tokens = _integer(keys, "num_speculative_tokens", most=most, default=most)
    # any draft of the last is good enough; a short one is, where there is no room for a longer
    default = 1 if is_last else min(DEFAULT_MIN_DRAFT_TOKENS, num_tokens)
    return MemberConfig(
        method=method,
        drafter=drafter,
        num_speculative_tokens=num_tokens,
        min_draft_tokens=_integer(keys, "min_draft_tokens", most=num_tokens, default=default),
    )


def _refuse_misplaced(keys: dict[str, Any], *, is_last: bool) -> None:
    for key in _KEYS_OF_ALL:
        if key in keys:
            raise UnknownKeyError(f"{key!r} is for all drafters together; write it beside 'drafters'")
    if "drafters" in keys or keys.get("method") == "hybrid":
        raise ConfigError("a hybrid cannot be part of another; write its drafters into the outer list")
    if is_last and "min_draft_tokens" in keys:
        raise ConfigError("min_draft_tokens: the last drafter's drafts are taken whatever their length; leave it out")


def _integer(keys: dict[str, Any], name: str, *, most: int, default: int) -> int:
    value = keys.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise ConfigError(f"{name}: got {value!r}; must be an integer from 1 to {most}; leave it out for {default}")
    return value
