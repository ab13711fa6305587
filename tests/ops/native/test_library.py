"""Which build of the kernels is taken, and that their threads harm nobody: callers, other threads, children."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from forerun.errors import ConfigError
from forerun.ops.native import library
from forerun.ops.native.library import LEVELS, VARIABLE, OneTorchThread, kernels_of_level, library_file, load_kernels
from tests.native import KERNELS, every_level, needs_kernels, packed_linear, threads

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="affinity and fork as Linux has them")


@pytest.fixture(autouse=True)
def no_variable(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)


# --- which build ----------------------------------------------------------------------------------


@needs_kernels
def test_the_best_build_that_runs_here_is_reserved():
    assert load_kernels() is next(iter(KERNELS.values()))


@pytest.mark.parametrize("level", KERNELS)
def test_the_environment_may_name_a_level(monkeypatch, level):
    monkeypatch.setenv(VARIABLE, level)
    assert load_kernels() is KERNELS[level]


def test_the_environment_may_turn_them_off(monkeypatch):
    monkeypatch.setenv(VARIABLE, "off")
    assert load_kernels() is None


@pytest.mark.parametrize("level", ["avx1024", "", "OFF"])
def test_an_unknown_level_is_refused_with_those_there_are(monkeypatch, level):
    monkeypatch.setenv(VARIABLE, level)
    with pytest.raises(ConfigError, match=f"{VARIABLE}: got '{level}'; may be off, avx512bf16, .*portable"):
        load_kernels()


@pytest.mark.parametrize("level", LEVELS)
def test_a_level_that_is_not_here_is_refused_when_asked_for(monkeypatch, level):
    monkeypatch.setenv(VARIABLE, level)
    monkeypatch.setattr(library, "kernels_of_level", lambda level: None)
    with pytest.raises(ConfigError, match=f"'{level}' is not built or not for this CPU"):
        load_kernels()


def test_where_nothing_is_built_there_are_none(monkeypatch, tmp_path):
    monkeypatch.setattr(library, "library_file", lambda level: tmp_path / library_file(level).name)
    monkeypatch.setattr(library, "kernels_of_level", kernels_of_level.__wrapped__)
    assert load_kernels() is None


@every_level
def test_each_file_holds_the_level_of_its_name(kernels):
    library = ctypes.CDLL(str(library_file(kernels.level)))
    library.forerun_level.restype = ctypes.c_char_p
    assert library.forerun_level() == kernels.level.encode()


@needs_kernels
def test_a_file_of_another_level_is_refused(monkeypatch):
    monkeypatch.setattr(library, "library_file", lambda _: library_file("portable"))
    with pytest.raises(
        ConfigError, match=r"native CPU kernels: libforerun_portable.*it was built for portable\); reinstall"
    ):
        kernels_of_level.__wrapped__("avx2")


def test_a_damaged_file_is_refused(monkeypatch, tmp_path):
    damaged = tmp_path / "libforerun_avx2.so"
    damaged.write_bytes(b"no library")
    monkeypatch.setattr(library, "library_file", lambda _: damaged)
    with pytest.raises(ConfigError, match=r"libforerun_avx2.so cannot be used .*; reinstall forerun, or set"):
        kernels_of_level.__wrapped__("avx2")


@needs_kernels
def test_a_build_for_another_cpu_is_passed_over(monkeypatch):
    best, *others = LEVELS
    monkeypatch.setattr(library, "kernels_of_level", lambda level: None if level == best else KERNELS.get(level))
    found = load_kernels()
    assert found is next((KERNELS[level] for level in others if level in KERNELS), None)


@needs_kernels
def test_as_many_threads_are_taken_as_torch_has():
    torch.set_num_threads(2)
    try:
        assert load_kernels().num_threads == 2
    finally:
        torch.set_num_threads(1)
        assert load_kernels().num_threads == 1


def test_where_nothing_is_built_the_loss_is_told_once(caplog, monkeypatch, tmp_path):
    monkeypatch.setattr(library, "library_file", lambda level: tmp_path / library_file(level).name)
    library.warn_if_not_built.cache_clear()
    library.warn_if_not_built()
    library.warn_if_not_built()
    (record,) = caplog.records
    assert "decoding is slower, and in bf16 speculated text may differ" in record.message
    library.warn_if_not_built.cache_clear()


@needs_kernels
def test_kernels_that_are_only_turned_off_are_not_missed(caplog, monkeypatch):
    monkeypatch.setenv(VARIABLE, "off")
    library.warn_if_not_built.cache_clear()
    library.warn_if_not_built()
    assert not caplog.records


# --- threads --------------------------------------------------------------------------------------


@linux_only
@every_level
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_the_callers_affinity_is_what_it_was(kernels, num_threads):
    linear, before = packed_linear(kernels, torch.randn(100, 30), dtype=torch.float32), os.sched_getaffinity(0)
    with threads(kernels, num_threads):
        for core in 10 * sorted(before):
            os.sched_setaffinity(0, {core})  # it then sits on this core, which may be a worker's, if it is not moved
            os.sched_setaffinity(0, before)
            linear(torch.randn(3, 30))
            assert os.sched_getaffinity(0) == before


@every_level
@pytest.mark.parametrize("num_threads", [1, 3])
def test_calls_of_several_python_threads_do_not_mix(kernels, num_threads):
    linears = [packed_linear(kernels, torch.randn(90, 16 + i), dtype=torch.bfloat16) for i in range(4)]
    inputs = [torch.randn(1 + 5 * i, 16 + i) for i in range(4)]
    expected = [linear(x) for linear, x in zip(linears, inputs, strict=True)]

    def call(turn):
        return torch.equal(linears[turn % 4](inputs[turn % 4]), expected[turn % 4])

    with threads(kernels, num_threads), ThreadPoolExecutor(4) as pool:
        assert all(pool.map(call, range(200)))


def compute_in_child(linear, x, expected, affinity):
    """Exits with 0 if a child gets what its parent got, on all of its parent's cores."""
    found = linear(x)
    os._exit(0 if torch.equal(found, expected) and os.sched_getaffinity(0) == affinity else 1)


@linux_only
@every_level
@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_forked_child_computes_what_its_parent_does(kernels, num_threads):
    linear, x = packed_linear(kernels, torch.randn(100, 30), dtype=torch.float32), torch.randn(3, 30)
    with threads(kernels, num_threads):
        expected = linear(x)
        child = multiprocessing.get_context("fork").Process(
            target=compute_in_child, args=(linear, x, expected, os.sched_getaffinity(0))
        )
        child.start()
        child.join(30)
        assert child.exitcode == 0
        assert torch.equal(linear(x), expected), "the parent's threads go on"


def fail_with_one_torch_thread():
    with OneTorchThread():
        assert torch.get_num_threads() == 1
        raise ConfigError("not today")


def test_torch_has_one_thread_inside_the_block_and_its_own_number_after():
    torch.set_num_threads(2)
    try:
        with pytest.raises(ConfigError, match="not today"):
            fail_with_one_torch_thread()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


@every_level
def test_memory_can_be_read_by_all_threads(kernels):
    buffer = torch.zeros(64, dtype=torch.int64)
    buffer[33] = 5
    with threads(kernels, 2):
        assert kernels.read(buffer) == 5  # the exclusive or of all words
