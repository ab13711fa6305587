"""Compiles Triton kernels for sizes that are compiled otherwise than the usual ones of `compile_kernels`; run like that.

triton makes a constant of a number that is 1, drops what it knows of one that 16 does not divide, and takes other shapes for other
widths of heads and numbers. So an engine without drafts (one node, one path), a request by itself, short vocabularies, and weights
of other models have kernels that nothing else compiles.
"""

from __future__ import annotations

import sys

import torch
import triton
from triton.runtime.jit import JITFunction

from forerun.ops.cuda.chains import ChainPlan
from forerun.ops.cuda.kernels import attention, chains, edits, layers, matmul, ngram, noise, sampling, steps
from forerun.ops.cuda.table import DevicePlan, DeviceTable, RuleTable, StepRows, Verdicts
from forerun.ops.rotary import Rotation
from tests.slow.compile_kernels import CPU, NUM_ROWS, NUM_SLOTS, AbsentGPU, compile_only, grow_trees, ints

HEADS = [
    (9, 3, 64),  # SmolLM2-135M
    (32, 32, 96),  # Phi-3
    (8, 4, 256),  # Gemma 2
    (71, 1, 64),  # Falcon
    (3, 1, 80),
]
"""Heads, key heads and the width of a head."""

WIDTHS = [72, 576, 16384]
VOCABULARIES = [7, 49152, 262144]


def one_of_each(num_nodes, num_slots, num_rows, vocab_size):
    """A step of so few sequences, rows, and nodes of a draft."""
    table = DeviceTable.empty(num_slots, max_length=100, num_blocks=1, most_drafted=num_nodes, device=CPU)
    rules = RuleTable.empty(num_slots, vocab_size, device=CPU, most_stop_ids=1, most_biases=1)
    rows = StepRows.empty(num_rows, num_slots, longest_path=num_nodes, device=CPU)
    verdicts = Verdicts.empty(num_slots, num_nodes, device=CPU)
    plan = DevicePlan(slots=ints(num_slots), tails=ints(num_slots), most_drafted=ints(num_slots), ends=ints(num_slots))
    steps.place(ints(4, 1), table)
    steps.prepare(plan, table, rows, block_size=16)
    steps.match(plan, table, rows, ints(num_rows), verdicts)
    steps.move(plan, rows, verdicts, torch.empty(1, 64, 1, 1))
    steps.commit(plan, table, rules, verdicts)
    ngram.propose(table, plan.slots, plan.tails, ints(32), shortest=1, longest=1)
    draft(table, plan, rows)
    logits = torch.empty(num_rows, vocab_size)
    edits.edit(logits, rows, table, rules)
    edits.edit(logits, rows, table, rules, row_masks=ints(num_rows, 1), has_row_mask=ints(num_rows))
    draw(rules, rows, logits)


def draw(rules, rows, logits):
    sampling.sample(logits, rows, rules, ints(len(logits)), torch.empty(len(logits)))
    sampling.sample_first(logits, rows, rules, ints(len(logits), 1))
    sampling.sample_first(logits, rows, rules, ints(len(logits), 5))


def draft(table, plan, rows):
    """Chains of one token."""
    num_slots, num_rows = len(plan.slots), len(rows.slots)
    chain = ChainPlan(slots=plan.slots, starts=plan.tails, limits=plan.tails, blocks=ints(num_slots, 1))
    before = torch.zeros(num_rows, dtype=torch.int64)
    chains.take_blocks(chain, table, block_size=16, first_scratch=1, scratch_per_slot=1)
    chains.read_texts(chain, table, rows, before[:num_slots], before, block_size=16)
    chains.place_masks(chain, table, plan.tails, rows, token_id=1, block_size=16)
    chains.extend(chain, table, plan.slots, rows, depth=0, block_size=16)
    chains.write_chains(table, plan.slots, plan.tails, ints(num_slots, 1))


def attend(num_heads, num_kv_heads, dim, dtype, **options):
    num_rows, block_table = 5, ints(1, 1)
    keys, query = (
        torch.empty(count, heads, dim, dtype=dtype) for count, heads in ((64, num_kv_heads), (num_rows, num_heads))
    )
    rows = StepRows.empty(num_rows, 1, longest_path=1, device=CPU)
    attention.attend(query, keys, keys, query, rows, block_table, block_size=16, scale=1, **options)
    qkv, angles = torch.empty(num_rows, num_heads + 2 * num_kv_heads, dim), torch.empty(num_rows, 1, dim // 4)
    norms = {"query_norm": torch.empty(num_heads, dim), "key_norm": torch.empty(num_kv_heads, dim), "eps": 1e-6}
    layers.rotate_and_write(qkv, query, keys, keys, rows.kv_slots, Rotation(angles, angles), **norms)


def norm(width, dtype):
    residual, normed, weight = (
        torch.empty(3, width),
        torch.empty(3, width, dtype=dtype),
        torch.empty(width, dtype=dtype),
    )
    layers.rms_norm(residual, weight, normed, eps=1e-5)
    layers.rms_norm(normed, weight, normed, eps=1e-5)
    layers.add_normed(residual, weight, residual, eps=1e-5, scale=1)
    layers.embed(ints(3), torch.empty(8, width, dtype=dtype), residual, scale=1)
    layers.keep(residual, torch.zeros(3, dtype=torch.int64), normed)


def multiply(num_inputs, dtype):
    for num_rows in (1, 17):
        x, weight, bias = (
            torch.empty(*shape, dtype=dtype) for shape in ((num_rows, num_inputs), (144, num_inputs), (144,))
        )
        matmul.linear(x, weight, torch.empty(num_rows, 144, dtype=dtype))
        matmul.linear(x, weight, torch.empty(num_rows, 144), bias=bias)
        matmul.gated_linear(x, weight, torch.empty(num_rows, 72, dtype=dtype), activation="silu", bias=bias)


def grow_trees_of_one_token():
    table = DeviceTable.empty(NUM_SLOTS, max_length=100, num_blocks=1, most_drafted=1, device=CPU)
    chain = ChainPlan(slots=ints(NUM_SLOTS), starts=ints(NUM_SLOTS), limits=ints(NUM_SLOTS), blocks=ints(NUM_SLOTS, 1))
    grow_trees(chain, table, StepRows.empty(NUM_ROWS, NUM_SLOTS, longest_path=1, device=CPU))


def call_launchers():
    grow_trees_of_one_token()
    one_of_each(1, 1, 1, VOCABULARIES[0])
    one_of_each(1, 3, 3, 33)
    rules, rows = RuleTable.empty(2, VOCABULARIES[-1], device=CPU), StepRows.empty(2, 1, longest_path=1, device=CPU)
    for vocab_size in VOCABULARIES[1:]:
        draw(rules, rows, torch.empty(2, vocab_size))
    noise.row_keys(torch.zeros(1, dtype=torch.int64), ints(1))
    for heads in HEADS:
        attend(*heads, torch.bfloat16, num_hidden=1)
    for dtype in (torch.float16, torch.float32):
        attend(*HEADS[0], dtype, window=1, soft_cap=30)
        attend(*HEADS[2], dtype, window=1024)
        multiply(4096, dtype)
    multiply(72, torch.bfloat16)
    for width in WIDTHS:
        norm(width, torch.bfloat16)
    norm(576, torch.float32)


if __name__ == "__main__":
    triton.runtime.driver.set_active(AbsentGPU(int(sys.argv[1])))
    JITFunction.__getitem__ = compile_only
    call_launchers()
