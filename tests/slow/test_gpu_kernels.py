"""Triton's compiler takes every kernel for Ampere, Ada, Hopper and Blackwell, without a GPU; what runs there is still to be seen."""

from __future__ import annotations

import pytest

from tests.slow.compiled_kernels import SHARED, compiled_by

pytestmark = pytest.mark.slow
pytest.importorskip("triton", reason="needs triton: pip install 'forerun[cuda]'")

EXACT = {"_uniform_rows", "_edit", "_find_floor", "_race"}  # defined to the bit: each operation rounds once
STACK = {80: 0, 86: 0, 89: 0, 90: 0, 100: 16, 120: 0}  # bytes of a thread that may lie in memory instead of registers
MMA = {"tcgen05.mma", "wgmma.mma", "mma.sync"}


@pytest.fixture(scope="module", params=SHARED, ids="capability {}".format)
def capability(request):
    return request.param


@pytest.fixture(scope="module")
def compiled(capability, tmp_path_factory):
    return compiled_by("compile_kernels", capability, tmp_path_factory.mktemp("triton"))


def test_products_of_few_and_many_rows_run_on_the_same_instruction(compiled):
    products = [one for one in compiled if one["kernel"] in ("_multiply", "_attend_chunks") and not one["is_wide"]]
    found = [one["instructions"] for one in products if not one["is_fp32"]]
    assert 0 < len(found) < len(products)
    assert all(MMA.intersection(instructions) == {"mma.sync"} for instructions in found)


def test_wide_tiles_run_on_hoppers_own_instruction(compiled, capability):
    found = [one["instructions"] for one in compiled if one["is_wide"]]
    assert len(found) == (1 if SHARED[capability] < 147 else 2)  # tiles of 128 rows need more
    if capability in (80, 86, 89, 90):
        assert all((("wgmma.mma" if capability == 90 else "mma.sync") in one) for one in found)


def test_kernels_that_are_defined_to_the_bit_fuse_nothing(compiled):
    found = {one["kernel"]: one["instructions"] for one in compiled}
    assert found.keys() >= EXACT
    for kernel in EXACT:
        assert not {"fma.rn.f32", "fma.rn.f64"} & {*found[kernel]}, kernel


def test_shared_memory_is_what_a_multiprocessor_has(compiled, capability):
    too_large = {one["kernel"]: one["shared"] for one in compiled if one["shared"] > SHARED[capability] * 1024}
    assert too_large == {}


def test_what_a_thread_works_on_lies_in_registers_but_for_attention_in_fp32(compiled, capability):
    """Tensor cores do not multiply in fp32 as IEEE has it: threads do, and hold more."""
    in_fp32 = [one for one in compiled if one["kernel"] == "_attend_chunks" and one["is_fp32"]]
    spilled = {
        one["kernel"]: one["stack"] for one in compiled if one not in in_fp32 and one["stack"] > STACK[capability]
    }
    assert spilled == {}
    assert max(one["stack"] for one in in_fp32) <= 4096


def test_registers_suffice_for_a_whole_block(compiled):
    too_many = {one["kernel"]: one for one in compiled if one["registers"] * one["warps"] * 32 > 65536}
    assert too_many == {}
