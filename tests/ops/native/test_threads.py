"""Threads of the kernels and of torch: they harm nobody, neither callers, other threads and engines, children nor other processes."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from forerun.errors import ConfigError
from forerun.ops.native import threads as native_threads
from forerun.ops.native.library import load_kernels
from forerun.ops.native.threads import OneTorchThread, cores_to_bind, num_threads_to_use
from tests.native import BF16, FP32, KERNELS, every_level, needs_kernels, packed_linear, threads

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="affinity and fork as Linux has them")


@pytest.fixture
def two_torch_threads():
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


# --- the team of one process ----------------------------------------------------------------------


@linux_only
@every_level
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_the_callers_affinity_is_what_it_was(kernels, num_threads):
    linear, before = packed_linear(kernels, torch.randn(100, 30), weight_format=FP32), os.sched_getaffinity(0)
    with threads(kernels, num_threads):
        for core in 10 * sorted(before):
            os.sched_setaffinity(0, {core})  # it then sits on this core, which may be a worker's, if it is not moved
            os.sched_setaffinity(0, before)
            linear(torch.randn(3, 30))
            assert os.sched_getaffinity(0) == before


@every_level
@pytest.mark.parametrize("num_threads", [1, 3])
def test_calls_of_several_python_threads_do_not_mix(kernels, num_threads):
    linears = [packed_linear(kernels, torch.randn(90, 16 + i), weight_format=BF16) for i in range(4)]
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
    linear, x = packed_linear(kernels, torch.randn(100, 30), weight_format=FP32), torch.randn(3, 30)
    with threads(kernels, num_threads):
        expected = linear(x)
        child = multiprocessing.get_context("fork").Process(
            target=compute_in_child, args=(linear, x, expected, os.sched_getaffinity(0))
        )
        child.start()
        child.join(30)
        assert child.exitcode == 0
        assert torch.equal(linear(x), expected), "the parent's threads go on"


FORKS_WHILE_COMPUTING = """
import os, threading, time, torch
from forerun.ops.native.library import load_kernels
kernels, stop = load_kernels(), threading.Event()
rows, out, weight = torch.ones(2000, 4096), torch.empty(2000, 4096), torch.ones(4096)

def compute(count):
    kernels.rms_norm(rows.data_ptr(), weight.data_ptr(), 1e-5, count, 4096, out.data_ptr())

def compute_until_stopped():
    while not stop.is_set():
        compute(2000)

threading.Thread(target=compute_until_stopped).start()
children = []
for _ in range(10):
    time.sleep(0.01)
    if not (child := os.fork()):
        compute(1)
        os._exit(0)
    children.append(child)
stop.set()
for child in children:
    os.waitpid(child, 0)
"""


@linux_only
@needs_kernels
def test_a_child_that_is_forked_while_another_thread_computes_has_a_team_of_its_own():
    alone = os.environ | {"OMP_NUM_THREADS": "1"}  # for which no number of threads is ever set
    started = subprocess.Popen([sys.executable, "-c", FORKS_WHILE_COMPUTING], env=alone, start_new_session=True)
    try:
        assert started.wait(30) == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)


@contextlib.contextmanager
def busy_cores():
    """Two processes for each core that compute for as long as the block lasts."""
    command = [sys.executable, "-c", "while True: pass"]
    busy = [subprocess.Popen(command) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


@needs_kernels
def test_members_that_the_system_stops_change_no_bit():
    kernels = load_kernels()
    linear, x = packed_linear(kernels, torch.randn(2000, 300), weight_format=BF16), torch.randn(24, 300)
    expected = linear(x)
    with busy_cores(), threads(kernels, 3):  # more members than cores take part, then fewer, then all again
        assert all(torch.equal(linear(x), expected) for _ in range(300))


# --- torch's threads ------------------------------------------------------------------------------


def fail_with_one_torch_thread():
    with OneTorchThread():
        assert torch.get_num_threads() == 1
        raise ConfigError("not today")


@pytest.mark.usefixtures("two_torch_threads")
def test_torch_has_one_thread_inside_the_block_and_its_own_number_after():
    with pytest.raises(ConfigError, match="not today"):
        fail_with_one_torch_thread()
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_torch_threads")
def test_blocks_of_one_engine_or_of_several_may_be_nested():
    one, other = OneTorchThread(), OneTorchThread()
    with one, other, one:
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2


class Stepper(threading.Thread):
    """An engine thread that is inside its block from `enter` to `leave`."""

    def __init__(self, block=None):
        super().__init__(daemon=True)
        self._block = OneTorchThread() if block is None else block
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self.start()

    def run(self):
        self._go.acquire()
        with self._block:
            self.inside = torch.get_num_threads()
            self._done.release()
            self._go.acquire()
        self.after = torch.get_num_threads()
        self._done.release()

    def turn(self):
        """Enter the block, or leave it."""
        self._go.release()
        assert self._done.acquire(timeout=30)


@pytest.mark.usefixtures("two_torch_threads")
@pytest.mark.parametrize("order", ["aabb", "abab", "abba"])
@pytest.mark.parametrize("shared", [False, True], ids=["own blocks", "one block"])
def test_engines_that_step_at_once_leave_every_thread_what_it_had(order, shared):
    block = OneTorchThread()
    steppers = {name: Stepper(block if shared else None) for name in "ab"}
    for name in order:
        steppers[name].turn()
    assert {(stepper.inside, stepper.after) for stepper in steppers.values()} == {(1, 2)}
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(torch.get_num_threads).result() == 2, "of a thread that comes later"


@needs_kernels
@pytest.mark.usefixtures("two_torch_threads")
def test_kernels_loaded_while_another_engine_steps_keep_their_threads():
    stepper = Stepper()
    stepper.turn()
    try:
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(load_kernels).result().num_threads == min(2, num_threads_to_use())
            assert pool.submit(num_threads_to_use).result() == num_threads_to_use()
    finally:
        stepper.turn()
        torch.set_num_threads(1)
        load_kernels()


# --- control groups -------------------------------------------------------------------------------


@pytest.mark.usefixtures("two_torch_threads")
@pytest.mark.parametrize(("quota", "count"), [(None, 2), (8.0, 2), (2.0, 2), (1.9, 1), (0.5, 1)])
def test_no_more_threads_compute_than_whole_cpus_are_allowed(monkeypatch, caplog, quota, count):
    monkeypatch.setattr(native_threads, "cpu_quota", lambda: quota)
    assert num_threads_to_use() == count
    said = [record.message for record in caplog.records]
    assert said == (
        []
        if count == 2
        else [f"native CPU kernels: 1 threads compute instead of 2: the control group allows {quota} CPUs"]
    )


@needs_kernels
@pytest.mark.usefixtures("two_torch_threads")
def test_kernels_are_loaded_with_the_threads_that_the_quota_allows(monkeypatch):
    monkeypatch.setattr(native_threads, "cpu_quota", lambda: 1.0)
    assert load_kernels().num_threads == 1


# --- cores ----------------------------------------------------------------------------------------


@pytest.fixture
def own_leases(monkeypatch):
    """Leases that no other process on this machine asks for."""
    monkeypatch.setattr(native_threads, "CORE_LEASE", f"forerun-test/{uuid.uuid4()}/{{cpu}}")
    yield
    native_threads.release_cores()


@pytest.fixture
def four_cores(monkeypatch, own_leases):
    """A process that may use four cores, without a quota."""
    monkeypatch.setattr(native_threads, "usable_cores", lambda: [0, 2, 4, 6])
    monkeypatch.setattr(native_threads, "cpu_quota", lambda: None)


@linux_only
@pytest.mark.usefixtures("four_cores")
def test_a_process_binds_its_threads_where_it_uses_every_core_it_may():
    assert cores_to_bind(4) == [0, 2, 4, 6]
    assert cores_to_bind(4) == [0, 2, 4, 6], "its own lease is no hindrance"


@linux_only
@pytest.mark.usefixtures("four_cores")
@pytest.mark.parametrize("num_threads", [1, 2, 3, 5])
def test_a_process_that_leaves_cores_to_others_binds_nothing(num_threads):
    cores_to_bind(4)
    assert cores_to_bind(num_threads) == []
    assert not native_threads._leases


@linux_only
@pytest.mark.usefixtures("four_cores")
@pytest.mark.parametrize(("quota", "binds"), [(4.0, True), (3.5, False)])
def test_a_process_under_a_quota_binds_nothing(monkeypatch, quota, binds):
    monkeypatch.setattr(native_threads, "cpu_quota", lambda: quota)
    assert bool(cores_to_bind(4)) is binds


@linux_only
@pytest.mark.usefixtures("four_cores")
def test_a_process_that_shares_its_cores_out_keeps_the_lease_of_its_own_part():
    assert cores_to_bind(4) == [0, 2, 4, 6]
    assert native_threads.lease_cores([0, 2])
    assert sorted(native_threads._leases) == [0, 2]


@linux_only
@pytest.mark.usefixtures("four_cores")
def test_a_core_that_another_process_has_leased_is_bound_again_when_that_ends():
    ours, theirs = multiprocessing.Pipe()

    def hold():
        theirs.send(cores_to_bind(4))
        theirs.recv()
        os._exit(0)

    child = multiprocessing.get_context("fork").Process(target=hold)
    child.start()
    assert ours.recv() == [0, 2, 4, 6]
    assert cores_to_bind(4) == []
    ours.send("end")
    child.join(30)
    assert cores_to_bind(4) == [0, 2, 4, 6]


def bound_cores():
    """The cores that threads of this process are bound to, beside those that may run on all it has."""
    allowed = os.sched_getaffinity(0)
    affinities = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):
            affinities.append(os.sched_getaffinity(int(task.name)))
    return [core for affinity in affinities if affinity != allowed for core in affinity]


def compute_on_two_threads(kernels, linear, pipe):
    """Sends which cores a process with two threads binds, and waits for the others."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    kernels.use_threads(2)
    linear(torch.zeros(1, 30))
    pipe.send(bound_cores())
    pipe.recv()
    os._exit(0)


@linux_only
@needs_kernels
@pytest.mark.skipif(sys.platform != "linux" or len(os.sched_getaffinity(0)) < 2, reason="one core cannot be shared out")
@pytest.mark.usefixtures("own_leases")
def test_of_four_processes_of_two_threads_no_two_bind_a_thread_to_the_same_core(monkeypatch):
    monkeypatch.setattr(native_threads, "cpu_quota", lambda: None)
    kernels = next(iter(KERNELS.values()))
    linear = packed_linear(kernels, torch.randn(64, 30), weight_format=BF16)
    pipes, children = [], []
    for _ in range(4):
        ours, theirs = multiprocessing.Pipe()
        child = multiprocessing.get_context("fork").Process(
            target=compute_on_two_threads, args=(kernels, linear, theirs)
        )
        child.start()
        pipes.append(ours)
        children.append(child)
    bound = [core for pipe in pipes for core in pipe.recv()]
    for pipe, child in zip(pipes, children, strict=True):
        pipe.send("end")
        child.join(30)
    assert len(bound) == 1, "one process has the two cores, and binds its worker to one of them"
