"""Compiles every Triton kernel for GPUs of a compute capability, 90 say, on a machine without one; prints a line for each as JSON.

Run by `tests/slow/test_gpu_kernels.py` in a process of its own: triton decides when it is imported whether it interprets.
The launchers are called as an engine would call them, with a driver that names the GPU and launches nothing.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from forerun.ops.cuda.chains import ChainPlan
from forerun.ops.cuda.kernels import attention, chains, edits, layers, matmul, ngram, noise, sampling, steps, trees
from forerun.ops.cuda.table import DevicePlan, DeviceTable, RuleTable, StepRows, Verdicts
from forerun.ops.cuda.tiles import rule_of
from forerun.ops.cuda.trees import TreeLevel, TreePlan
from forerun.ops.rotary import Rotation
from tests.slow.compiled_kernels import SHARED

CPU = torch.device("cpu")
NUM_ROWS, NUM_SLOTS, VOCAB_SIZE, MAX_LENGTH, MOST_DRAFTED = 64, 8, 128256, 4096, 8
HEADS, KV_HEADS, DIM, WIDTH = 32, 8, 128, 4096
OTHER_DIMS = (64, 96, 192, 256)  # of a head, as other families have them
INSTRUCTIONS = ("tcgen05.mma", "wgmma.mma", "mma.sync", "fma.rn.f64", "fma.rn.f32")


class AbsentGPU:
    """A driver of a GPU that is not there."""

    def __init__(self, capability):
        self._capability = capability

    def get_current_device(self):
        return 0

    def get_current_stream(self, _device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", self._capability, 32)


def resources(cubin):
    """What `cuobjdump` says that a kernel takes: registers and bytes of the stack, where ptxas spills, of a thread."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", said))
    return {"registers": int(found["REG"]), "stack": int(found["STACK"]) + int(found["LOCAL"])}


def compile_only(self, grid):
    """Stands in for `kernel[grid]`."""

    def compiled(*args, **options):
        kernel = self.run(*args, grid=grid, warmup=True, **options)
        ptx = kernel.asm["ptx"]
        record = {
            "kernel": self.fn.__name__,
            "is_wide": options.get("TILE_ROWS", 0) > matmul.MANY_ROWS and self.fn.__name__ == "_multiply",
            "is_fp32": any(isinstance(one, torch.Tensor) and one.dtype == torch.float32 for one in args[:2]),
            "instructions": [name for name in INSTRUCTIONS if name in ptx],
            "shared": kernel.metadata.shared,
            "warps": kernel.metadata.num_warps,
            **resources(kernel.asm["cubin"]),
        }
        print(json.dumps(record), flush=True)
        return kernel

    return compiled


def bf16(*shape):
    return torch.empty(shape, dtype=torch.bfloat16)


def ints(*shape):
    return torch.zeros(shape, dtype=torch.int32)


def draft(plan, table, rows):
    chain = ChainPlan(slots=plan.slots, starts=plan.tails, limits=plan.tails, blocks=ints(NUM_SLOTS, 300))
    chains.take_blocks(chain, table, block_size=16, first_scratch=256, scratch_per_slot=2)
    before = torch.zeros(NUM_ROWS, dtype=torch.int64)
    chains.read_texts(chain, table, rows, before[:NUM_SLOTS], before, block_size=16)
    chains.place_masks(chain, table, plan.tails, rows, token_id=3, block_size=16)
    chains.extend(chain, table, plan.slots, rows, depth=1, block_size=16)
    chains.write_chains(table, plan.slots, plan.tails, ints(NUM_SLOTS, 5))
    single = StepRows.empty(NUM_SLOTS, 0, longest_path=1, device=CPU)
    chains.read_texts(chain, table, single, before[:NUM_SLOTS], before[:NUM_SLOTS], block_size=16)
    chains.place_masks(chain, table, plan.tails, single, token_id=3, block_size=16)
    chains.write_chains(table, plan.slots, plan.tails, ints(NUM_SLOTS, 1))
    grow_trees(chain, table, rows)


def call_launchers():
    table = DeviceTable.empty(NUM_SLOTS, max_length=MAX_LENGTH, num_blocks=256, most_drafted=MOST_DRAFTED, device=CPU)
    rules = RuleTable.empty(NUM_SLOTS, VOCAB_SIZE, device=CPU)
    rows = StepRows.empty(NUM_ROWS, NUM_SLOTS, longest_path=MOST_DRAFTED, device=CPU)
    verdicts = Verdicts.empty(NUM_SLOTS, MOST_DRAFTED, device=CPU)
    plan = DevicePlan(slots=ints(NUM_SLOTS), tails=ints(NUM_SLOTS), most_drafted=ints(NUM_SLOTS), ends=ints(NUM_SLOTS))
    logits, sampled = torch.empty(NUM_ROWS, VOCAB_SIZE), ints(NUM_ROWS)
    noise.uniform_rows(torch.empty(2, dtype=torch.int64), torch.empty(2, 64, dtype=torch.float64))
    masks = ints(NUM_ROWS, VOCAB_SIZE // 32)
    edits.edit(logits, rows, table, rules)
    edits.edit(logits, rows, table, rules, row_masks=masks, has_row_mask=sampled)
    sampling.sample(logits, rows, rules, sampled, torch.empty(NUM_ROWS))
    sampling.sample_first(logits, rows, rules, ints(NUM_ROWS, 3))
    steps.place(torch.zeros((4, 9), dtype=torch.int32), table)
    steps.prepare(plan, table, rows, block_size=16)
    steps.match(plan, table, rows, sampled, verdicts)
    steps.move(plan, rows, verdicts, bf16(2, 64, KV_HEADS, DIM))
    steps.commit(plan, table, rules, verdicts)
    draft(plan, table, rows)
    ngram.propose(table, plan.slots, plan.tails, ints(32), shortest=2, longest=5)
    keys, query = bf16(64, KV_HEADS, DIM), bf16(NUM_ROWS, HEADS, DIM)
    shape = {"block_size": 16, "scale": 0.1}
    attention.attend(query, keys, keys, query, rows, table.block_table, **shape)
    options = {"window": 512, "soft_cap": 50.0, "sinks": torch.empty(HEADS), "num_hidden": 1}
    attention.attend(query, keys, keys, query, rows, table.block_table, **shape, **options)
    residual, normed, weight = torch.empty(NUM_ROWS, WIDTH), bf16(NUM_ROWS, WIDTH), bf16(WIDTH)
    layers.embed(rows.tokens.long(), bf16(256, WIDTH), residual)
    layers.rms_norm(residual, weight, normed, eps=1e-5)
    layers.rms_norm(residual, None, normed, eps=1e-5)
    layers.rms_norm(residual[:, : WIDTH // 2], weight, normed[:, : WIDTH // 2], eps=1e-5)
    layers.add_normed(residual, weight, residual, eps=1e-5)
    layers.keep(residual, rows.kv_slots, bf16(64, WIDTH))
    angles = torch.empty(NUM_ROWS, 1, DIM // 2)
    qkv = torch.empty(NUM_ROWS, HEADS + 2 * KV_HEADS, DIM)
    layers.rotate_and_write(qkv, query, keys, keys, rows.kv_slots, Rotation(angles, angles))
    layers.rotate_and_write(qkv, query, keys, keys, rows.kv_slots, None)
    norms = {"query_norm": bf16(DIM), "key_norm": bf16(DIM), "eps": 1e-5}
    layers.rotate_and_write(qkv, query, keys, keys, rows.kv_slots, Rotation(angles, angles), **norms)
    for num_rows in (1, NUM_ROWS):
        x = bf16(num_rows, WIDTH)
        matmul.linear(x, bf16(VOCAB_SIZE // 8, WIDTH), torch.empty(num_rows, VOCAB_SIZE // 8))
        matmul.linear(x, bf16(WIDTH, WIDTH), bf16(num_rows, WIDTH), bias=weight)
        matmul.add_linear(x, bf16(WIDTH, WIDTH), torch.empty(num_rows, WIDTH))
        matmul.gated_linear(x, bf16(2 * WIDTH, WIDTH), bf16(num_rows, WIDTH), activation="silu")
        matmul.capped_linear(
            x, bf16(VOCAB_SIZE // 8, WIDTH), torch.empty(num_rows, VOCAB_SIZE // 8), factor=2.0, cap=30.0
        )
    multiply_in_wide_tiles()
    for activation in ("gelu", "gelu_pytorch_tanh"):
        matmul.gated_linear(normed, bf16(2 * WIDTH, WIDTH), normed, activation=activation)
    for dtype in (torch.bfloat16, torch.float32):
        for dim in OTHER_DIMS if dtype == torch.bfloat16 else (DIM, *OTHER_DIMS):
            query, keys = torch.empty(NUM_ROWS, HEADS, dim, dtype=dtype), torch.empty(64, KV_HEADS, dim, dtype=dtype)
            attention.attend(query, keys, keys, query, rows, table.block_table, **shape)
    for num_rows in (1, NUM_ROWS):
        x, weight = torch.empty(num_rows, WIDTH), torch.empty(WIDTH, WIDTH)
        matmul.linear(x, weight, torch.empty(num_rows, WIDTH))


def multiply_in_wide_tiles():
    tiles = rule_of(WIDTH, WIDTH)
    for tile_rows in (matmul.WIDE_ROWS, matmul.WIDEST_ROWS):
        if matmul._fits(tile_rows, tiles, SHARED[int(sys.argv[1])] << 10):
            parts = torch.empty(tiles.splits, 256, WIDTH)
            matmul._multiply_in_tiles(bf16(256, WIDTH), bf16(WIDTH, WIDTH), parts, tiles, tile_rows)


def grow_trees(plan, table, rows):
    asked = TreePlan(slots=plan.slots, limits=plan.limits, depths=plan.limits)
    for num_nodes in (1, 8, 64):
        level = TreeLevel(parents=ints(num_nodes), ranks=ints(num_nodes), rows=ints(num_nodes))
        drafted, grown = ints(NUM_SLOTS, 8, 8), ints(2, NUM_SLOTS, num_nodes)
        trees.append(asked, table, level, drafted, ints(NUM_SLOTS, 8), *grown, depth=1)
        columns = ints(1, num_nodes, 3).expand(NUM_SLOTS, -1, -1)
        trees.lay_out(plan, table, grown[0], columns, rows, block_size=16)
        order, candidates = torch.zeros((NUM_SLOTS, num_nodes), dtype=torch.int64), ints(NUM_SLOTS, 600)
        trees.write_best(asked, table, order, candidates, candidates, candidates.double())
    for most_drafted in (MOST_DRAFTED, 128):
        table = DeviceTable.empty(NUM_SLOTS, max_length=64, num_blocks=4, most_drafted=most_drafted, device=CPU)
        trees.write_paths(asked, table, ints(NUM_SLOTS, 5, 10), torch.empty(NUM_SLOTS, 5, 10))


if __name__ == "__main__":
    triton.runtime.driver.set_active(AbsentGPU(int(sys.argv[1])))
    JITFunction.__getitem__ = compile_only
    call_launchers()
