"""Steps over the Triton kernels, recorded launch by launch and replayed as a CUDA graph would: every launch with the arguments of then.

In triton's interpreter. A recording holds torch's operations and the kernels' launches, with their tensors and numbers; what waits
for the device, or hangs on a tensor's values, cannot be recorded.
"""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from forerun import SamplingParams
from forerun.executor.step_graphs import Recorded
from tests.contract.drafters import CASES
from tests.contract.test_contract import PROMPTS
from tests.cuda import DEVICE
from tests.engines import tiny_llm
from tests.slow.test_device_kernels import kernels  # noqa: F401 - a fixture

from triton.runtime.interpreter import GridExecutor  # isort: skip - tests.cuda comes first

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(DEVICE.type == "cuda", reason="the interpreter needs tensors on the CPU"),
]

aten = torch.ops.aten
WAITING = {aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.equal.default}
BY_INDEX = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}


class Recording(TorchDispatchMode):
    """Notes every operation, and refuses those for which a host waits."""

    def __init__(self, calls):
        super().__init__()
        self.calls = calls

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        is_by_mask = function in BY_INDEX and any(one is not None and one.dtype == torch.bool for one in args[1])
        if function in WAITING or is_by_mask:
            raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing: {function}")
        outputs = function(*args, **kwargs)

        def again():
            for old, new in zip(tree_leaves(outputs), tree_leaves(function(*args, **kwargs)), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)

        self.calls.append(again)
        return outputs


class LaunchRecorder:
    """Implements `Recorder` over the interpreter."""

    def __init__(self):
        self.num_replayed = 0
        self.num_launches = []

    def record(self, function):
        calls, launches, run = [], [], GridExecutor.__call__

        def launch(executor, *args, **kwargs):
            with _disable_current_modes():
                run(executor, *args, **kwargs)
            launches.append(executor.fn)
            calls.append(lambda: run(executor, *args, **kwargs))

        GridExecutor.__call__ = launch
        try:
            with Recording(calls):
                outputs = function()
        finally:
            GridExecutor.__call__ = run
        self.num_launches.append(len(launches))

        def replay():
            self.num_replayed += 1
            for call in calls:
                call()

        return Recorded(outputs, replay)


SAMPLING = [
    SamplingParams(temperature=0, max_tokens=9, allowed_token_ids=[3, 4, 5], ignore_eos=True),
    SamplingParams(temperature=0.9, top_p=0.9, top_k=40, seed=2**63, max_tokens=5),
    SamplingParams(temperature=0, max_tokens=7, repetition_penalty=1.3, presence_penalty=0.2, logit_bias={3: 5.0}),
]


@pytest.mark.parametrize("case", ["plain", "ngram", "random-tree", "eagle3", "peagle", "dflash", "mlp-speculator"])
def test_replayed_launches_give_the_texts_of_the_formulas(case, kernels):  # noqa: F811
    config = CASES[case] and CASES[case] | ({"draft_confidence_threshold": 0.0} if case == "ngram" else {})

    def outcome(recorder):
        llm = tiny_llm(config, device_step=True, verifies_all=True, max_num_seqs=3, max_num_batched_tokens=32)
        if recorder is not None:
            llm.executor.use_graphs([3, 16], recorder)
        outputs = llm.generate(PROMPTS[:3], SAMPLING, use_tqdm=False)
        assert llm.stats.times.num_replayed_steps == (0 if recorder is None else recorder.num_replayed)
        return [(one.outputs[0].token_ids, one.outputs[0].origins) for one in outputs]

    expected = outcome(None)
    kernels()
    recorder = LaunchRecorder()
    assert outcome(recorder) == expected
    assert recorder.num_replayed >= 3
    assert len(set(recorder.num_launches[:2])) == 1, "every size takes the same launches"


def test_a_step_that_hangs_on_values_cannot_be_recorded(caplog):
    """The formulas do: so it is the kernels that the others test."""
    llm = tiny_llm(device_step=True)
    recorder = LaunchRecorder()
    llm.executor.use_graphs([2], recorder)
    assert "not permitted when stream is capturing" in caplog.text
    assert llm.executor.graphs.num_recorded == 0
