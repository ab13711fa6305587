"""The table of verifiers names every one, and the lossy ones say so."""

from dataclasses import fields

import pytest

from forerun.verify import VERIFIERS

LOSSY = {"typical": {}, "threshold": {}, "synthetic": {"synthetic_acceptance_length": 2.0}}


@pytest.mark.parametrize("name", VERIFIERS)
def test_a_verifier_is_lossless_unless_it_is_known_to_be_lossy(name):
    assert VERIFIERS[name](**LOSSY.get(name, {})).build(2).is_lossless is (name not in LOSSY)


def test_no_two_verifiers_share_a_key():
    keys = [f.name for config in VERIFIERS.values() for f in fields(config)]
    assert len(keys) == len(set(keys))
