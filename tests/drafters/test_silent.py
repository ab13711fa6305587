"""The silent drafter is plain decoding."""

from __future__ import annotations

from forerun.drafters.base import DraftContext, DraftRequest
from forerun.drafters.silent import SilentConfig
from tests.drafters.texts import TARGET, sequence


def test_every_request_gets_an_empty_draft():
    requests = [DraftRequest(sequence([1, 1, 1], seq_id=i), 4, 4) for i in range(3)]
    drafts = SilentConfig().build(TARGET).propose(DraftContext(requests=requests))
    assert [len(draft) for draft in drafts] == [0, 0, 0]


def test_no_place_is_kept_for_drafts():
    assert SilentConfig().default_num_speculative_tokens == 0
