"""Drafters of the user's own: what is said at once of a class that could never draft."""

from __future__ import annotations

import pytest

from forerun.drafters.custom import CustomConfig
from forerun.errors import ConfigError


def build(**parts):
    """Make a drafter of a class with some parts beside, or in place of, those that all have; without those that are None."""
    own = {"__init__": lambda *_: None, "needs": frozenset(), **dict.fromkeys(("start", "propose", "stop"), print)}
    made = type("Mine", (), {name: part for name, part in (own | parts).items() if part is not None})
    return CustomConfig(drafter_class=made).build(None)


@pytest.mark.parametrize("needs", [None, set(), ["last_hidden"], frozenset({1})])
def test_a_class_that_does_not_say_what_it_reads_is_refused(needs):
    with pytest.raises(ConfigError, match=r"^Mine.needs: got .*; must be a frozenset of names of hidden states"):
        build(needs=needs)


def test_a_class_that_takes_no_target_is_refused():
    with pytest.raises(ConfigError, match=r"^Mine: cannot be made \(TypeError: .*; it is called with the TargetInfo"):
        build(__init__=lambda self: None)


@pytest.mark.parametrize("count", [-1, "x", 1.5])
def test_a_number_that_cannot_be_is_refused(count):
    with pytest.raises(
        ConfigError, match=r"^Mine.num_candidates: got .*; must be an integer of 0 or more; mend the class"
    ):
        build(num_candidates=count, learn=print)


@pytest.mark.parametrize("method", ["start", "propose", "stop"])
def test_a_class_without_one_of_the_three_methods_is_refused(method):
    with pytest.raises(ConfigError, match=rf"^Mine.{method}: there is no such method; a drafter has start, "):
        build(**{method: None})


def test_a_class_with_a_part_of_what_makes_a_drafter_with_kv_is_refused():
    parts = {"kv_bytes_per_block": 1, "num_scratch_blocks": 0, "use_kv": print}
    with pytest.raises(ConfigError, match=r"^Mine: has no scratch_bytes; KeepsKV is kv_bytes_per_block, .*use_kv; add"):
        build(**parts)
    build(**parts, scratch_bytes=0)


@pytest.mark.parametrize("part", [{"learn": print}, {"num_candidates": 2}])
def test_a_class_with_a_part_of_what_makes_a_drafter_that_learns_is_refused(part):
    with pytest.raises(ConfigError, match=r"^Mine: has no .*; LearnsFromTarget is num_candidates, learn"):
        build(**part)
