"""Writers keep to the shape that was asked for, however much more a draft may hold."""

from __future__ import annotations

import pytest

from forerun import SamplingParams
from tests.contract.test_contract import PROMPTS
from tests.drafters.recording import recorded, recorded_on_device
from tests.engines import tiny_llm


@pytest.mark.parametrize("method", ["eagle3", "mlp-speculator"])
def test_a_chain_is_no_deeper_than_the_tree_that_it_is(method):
    config = {"method": method.replace("-", "_"), "model": f"tiny-{method}", "draft_tree": [1, 1]}
    for device_step in (False, True):
        llm = tiny_llm(config | {"num_speculative_tokens": 6}, device_step=device_step)
        seen = [recorded(llm), recorded_on_device(llm) if device_step else []]
        llm.generate(PROMPTS[:2], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), use_tqdm=False)
        assert max(len(draft) for drafts in seen for _, draft in drafts) == 2
        assert llm.stats.num_failed_drafts == 0
