"""What the compiler makes of kernels for other sizes than the usual ones fits a multiprocessor, too."""

from __future__ import annotations

import pytest

from tests.slow.compiled_kernels import compiled_by

pytestmark = pytest.mark.slow
pytest.importorskip("triton", reason="needs triton: pip install 'forerun[cuda]'")

SHARED = {80: 163 * 1024, 90: 227 * 1024}  # bytes that a block may have


@pytest.fixture(scope="module", params=SHARED, ids="capability {}".format)
def capability(request):
    return request.param


@pytest.fixture(scope="module")
def compiled(capability, tmp_path_factory):
    return compiled_by("compile_other_sizes", capability, tmp_path_factory.mktemp("triton"))


def test_the_compiler_takes_each_of_them_and_none_is_too_large(compiled, capability):
    assert len(compiled) > 60
    too_large = [one for one in compiled if one["shared"] > SHARED[capability]]
    assert too_large == []
    assert [one for one in compiled if one["registers"] * one["warps"] * 32 > 65536] == []


def test_what_a_thread_works_on_lies_in_registers_where_tensor_cores_compute(compiled):
    assert [one for one in compiled if "mma.sync" in one["instructions"] and one["stack"]] == []


def test_products_of_few_and_many_rows_run_on_one_instruction(compiled):
    found = {instruction for one in compiled if one["kernel"] == "_multiply" for instruction in tensor_cores(one)}
    assert found == {"mma.sync"}


def test_attention_runs_on_one_instruction_whatever_the_heads(compiled):
    """Tiles of attention have as many rows of a product for all numbers of tokens, so that it may be another one for some heads."""
    found = [tensor_cores(one) for one in compiled if one["kernel"] == "_attend_chunks"]
    assert max(map(len, found)) == 1


def tensor_cores(one):
    return [name for name in one["instructions"] if "mma" in name]
