"""On a GPU what follows the match walk, KV moves, commit, drafts, packed results, gives what the formulas give on the CPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("triton", reason="needs triton: pip install 'forerun[cuda]'")

from forerun.core.batch import LayerKVSpec  # noqa: E402
from forerun.drafters.base import TargetInfo  # noqa: E402
from forerun.drafters.ngram import NgramConfig, NgramDrafter  # noqa: E402
from forerun.executor.device_ngrams import AskedDrafts, DeviceNgrams  # noqa: E402
from forerun.executor.device_results import pack  # noqa: E402
from forerun.kv.cache import KVCache  # noqa: E402
from forerun.ops.cuda import edits, ngram, steps  # noqa: E402
from forerun.ops.cuda.kernels import edits as edit_kernels  # noqa: E402
from forerun.ops.cuda.kernels import ngram as ngram_kernels  # noqa: E402
from forerun.ops.cuda.kernels import steps as step_kernels  # noqa: E402
from forerun.ops.cuda.table import DevicePlan, DeviceTable, RuleTable, StepRows, Verdicts  # noqa: E402

DEVICE = torch.device("cuda")
CPU = torch.device("cpu")
NUM_SLOTS, LENGTH, MOST_DRAFTED, VOCAB_SIZE, BLOCK = 6, 200, 4, 3000, 16
TREE = (-1, -1, 0, 1)


def ints(*values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


def random_ints(high, *shape):
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(high + len(shape)), dtype=torch.int32)


@dataclasses.dataclass
class Step:
    """One step over all slots, which draws what makes it accept nodes 1 and 3 of each tree, or 0 and 2."""

    device: torch.device
    move: object
    commit: object
    propose: object

    def __post_init__(self):
        device = self.device
        blocks = -(-LENGTH // BLOCK)
        self.table = DeviceTable.empty(
            NUM_SLOTS, max_length=LENGTH, num_blocks=blocks, most_drafted=MOST_DRAFTED, device=device
        )
        order = torch.randperm(NUM_SLOTS * blocks, generator=torch.Generator().manual_seed(0))
        self.table.block_table.copy_(order.view(NUM_SLOTS, blocks))
        self.table.tokens[:] = random_ints(3, NUM_SLOTS, LENGTH).to(device)
        self.table.lengths[:] = ints(*range(20, 20 + 25 * NUM_SLOTS, 25), device=device)
        self.table.computed[:] = self.table.lengths - 1
        self.table.draft_tokens[:] = ints(0, 1, 2, 2, device=device)
        self.table.draft_parents[:] = ints(*TREE, device=device)
        self.table.draft_sizes[:] = MOST_DRAFTED
        self.rules = RuleTable.empty(NUM_SLOTS, VOCAB_SIZE, device=device)
        slots = ints(*range(NUM_SLOTS), device=device)
        ones = torch.ones_like(slots)
        self.plan = DevicePlan(slots=slots, tails=ones, most_drafted=MOST_DRAFTED * ones, ends=ones)
        self.rows = StepRows.empty(NUM_SLOTS * 5, NUM_SLOTS, longest_path=MOST_DRAFTED, device=device)
        self.verdicts = Verdicts.empty(NUM_SLOTS, MOST_DRAFTED, device=device)
        self.sampled = ints(*([1, 9, 2, 7, 1, 0, 2, 9, 2, 9] * (NUM_SLOTS // 2)), device=device)
        self.cache = KVCache(
            [LayerKVSpec(num_kv_heads=2, key_dim=64, value_dim=64)] * 3,
            num_blocks=NUM_SLOTS * blocks,
            block_size=BLOCK,
            dtype=torch.bfloat16,
            device=device,
            feature_widths={"hidden": 100},
        )
        for stack in self.cache.stacks:
            stack.copy_(random_ints(1000, *stack.shape))
        target = TargetInfo(
            vocab_size=VOCAB_SIZE,
            max_model_len=LENGTH,
            num_speculative_tokens=MOST_DRAFTED,
            max_num_seqs=NUM_SLOTS,
            max_num_batched_tokens=64,
            block_size=BLOCK,
        )
        drafter = NgramDrafter(target, NgramConfig(prompt_lookup_min=1, prompt_lookup_max=4))
        self.ngrams = DeviceNgrams.of(drafter, self.table, self.rules, self.propose)
        limits = ints(4, 3, 0, 4, 4, 1, device=device)
        self.rules.max_length[:] = LENGTH
        self.asked = AskedDrafts(torch.where(slots == 3, -1, slots), limits)

    def run(self, prepare, match):
        prepare(self.plan, self.table, self.rows, block_size=BLOCK)
        match(self.plan, self.table, self.rows, self.sampled, self.verdicts)
        for entries in self.cache.stacks:
            self.move(self.plan, self.rows, self.verdicts, entries)
        self.commit(self.plan, self.table, self.rules, self.verdicts)
        self.ngrams.propose(self.asked)
        drafts = self.asked.drafts(self.table)
        return pack(self.verdicts, torch.zeros(NUM_SLOTS, device=self.device), drafts)

    def state(self):
        tables = [getattr(self.table, name) for name in DeviceTable.__dataclass_fields__]
        return [one.cpu() for one in (*tables, self.rules.counts, *self.cache.stacks)]


def on_cpu():
    step = Step(CPU, steps.move, steps.commit, ngram.propose)
    return step, step.run(steps.prepare, steps.match)


def on_gpu():
    return Step(DEVICE, step_kernels.move, step_kernels.commit, ngram_kernels.propose)


def test_kv_texts_and_drafts_after_a_step_are_those_of_the_formulas():
    expected, expected_result = on_cpu()
    assert expected.verdicts.num_accepted.tolist() == [2] * NUM_SLOTS
    assert (expected.table.draft_sizes > 0).any()
    found = on_gpu()
    result = found.run(step_kernels.prepare, step_kernels.match)
    assert torch.equal(result.cpu(), expected_result)
    assert all(map(torch.equal, found.state(), expected.state()))


def test_drafts_made_in_a_cuda_graph_are_those_made_eagerly():
    expected, expected_result = on_cpu()
    on_gpu().run(step_kernels.prepare, step_kernels.match)  # compiles
    torch.cuda.synchronize()
    found, graph = on_gpu(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = found.run(step_kernels.prepare, step_kernels.match)
    graph.replay()
    assert torch.equal(result.cpu(), expected_result)
    assert all(map(torch.equal, found.state(), expected.state()))


def test_masks_of_rows_leave_the_logits_of_the_formula():
    logits = torch.randn(8, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    masks = torch.randint(-(2**31), 2**31, (8, -(-VOCAB_SIZE // 32)), generator=torch.Generator().manual_seed(1))
    found = []
    for device, module in ((CPU, edits), (DEVICE, edit_kernels)):
        rows = StepRows.empty(8, 1, longest_path=1, device=device)
        rows.slots[:7] = 0
        table = DeviceTable.empty(1, max_length=4, num_blocks=1, most_drafted=1, device=device)
        rules = RuleTable.empty(1, VOCAB_SIZE, device=device)
        edited = logits.to(device, copy=True)
        has_mask = ints(1, 0, 1, 1, 0, 1, 1, 1, device=device)
        module.edit(edited, rows, table, rules, row_masks=masks.to(device, torch.int32), has_row_mask=has_mask)
        found.append(edited.cpu())
    assert torch.equal(*found)
    assert found[0][[0, 2, 3, 5, 6]].isinf().any()
    assert not found[0][[1, 4, 7]].isinf().any()
