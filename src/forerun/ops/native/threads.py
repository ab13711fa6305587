"""How many threads compute, and on which cores: torch's own, the kernels', and those of other processes beside them."""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import torch

from forerun.core.control_groups import cpu_quota
from forerun.errors import ConfigError

logger = logging.getLogger(__name__)

CORE_LEASE = "forerun/core/{cpu}"
"""Name of the abstract Unix socket that a process holds for each core that it binds a thread to."""


class _TorchThreads:
    """Torch's number of threads as it is outside of all `OneTorchThread` blocks."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.num_blocks = 0  # entered and not left, in all threads
        self.outside = 1  # what the first of them found
        self._thread = threading.local()

    @property
    def own_blocks(self) -> list[int]:
        """What each block that this thread is inside puts back, the outermost first."""
        blocks: list[int] = self._thread.__dict__.setdefault("blocks", [])
        return blocks

    def count(self) -> int:
        """Threads that torch computes with when this thread is in no block."""
        if self.own_blocks:
            return self.own_blocks[0]
        here = torch.get_num_threads()
        # A thread that first calls torch while another is in a block finds the number of that block.
        return self.outside if here == 1 and self.num_blocks else here


_torch_threads = _TorchThreads()


class OneTorchThread:
    """Inside the block torch computes with the calling thread only: its pool would fight the kernels' for the cores.

    Blocks of several engines may be nested in one thread and may overlap in several: each thread gets back the number
    that it had, and none takes another's 1 for its own.
    """

    def __enter__(self) -> None:
        with _torch_threads.lock:
            before = 1 if _torch_threads.own_blocks else _torch_threads.count()
            if _torch_threads.num_blocks == 0:
                _torch_threads.outside = before
            _torch_threads.num_blocks += 1
            _torch_threads.own_blocks.append(before)
            torch.set_num_threads(1)

    def __exit__(self, *_error: object) -> None:
        with _torch_threads.lock:
            _torch_threads.num_blocks -= 1
            torch.set_num_threads(_torch_threads.own_blocks.pop())


def num_threads_to_use() -> int:
    """As many as torch has, but no more than whole CPUs that the process's control groups allow.

    Threads beyond that would wait, spinning, for others that the system has stopped until the group's next period.
    """
    num_threads, quota = _torch_threads.count(), cpu_quota()
    if quota is None or num_threads <= quota:
        return num_threads
    allowed = max(1, int(quota))
    logger.warning(
        "native CPU kernels: %d threads compute instead of %d: the control group allows %g CPUs",
        *(allowed, num_threads, quota),
    )
    return allowed


def cores_to_bind(num_threads: int) -> list[int]:
    """A core for each of a team's threads; [] where they are left to the system's scheduler.

    A process binds its threads only where it has the cores to itself, as far as can be known: it uses every core of its
    affinity set, no control group allows it less, and no other process here has leased one of them.
    """
    cores, quota = usable_cores(), cpu_quota()
    has_all = len(cores) == num_threads > 1 and (quota is None or quota >= num_threads)
    with _leasing:
        release_cores()  # also where nothing is bound now
        return cores if has_all and lease_cores(cores) else []


@dataclass(frozen=True, slots=True)
class RankThreads:
    """The threads of one process of a tensor-parallel group, and the cores to bind them to; none: they are not bound."""

    num_threads: int
    cores: list[int]


def threads_of_ranks(num_ranks: int) -> list[RankThreads]:
    """Share this process's threads and cores out among the ranks of a group; neighbouring cores go to one rank.

    Raises:
        ConfigError: there are more ranks than threads.
    """
    most = _torch_threads.count()
    if num_ranks > most:
        raise ConfigError(
            f"tensor_parallel_size: got {num_ranks}, but there are {most} cores to compute on; lower it to {most} or less"
        )
    num_threads = max(1, num_threads_to_use() // num_ranks)
    cores, quota = usable_cores(), cpu_quota()
    is_bound = len(cores) == most and (quota is None or quota >= most)
    return [
        RankThreads(num_threads, cores[rank * num_threads : (rank + 1) * num_threads] if is_bound else [])
        for rank in range(num_ranks)
    ]


def usable_cores() -> list[int]:
    """One CPU number for each core that this process may use; [] where the system does not say."""
    if sys.platform != "linux":
        return []
    cores: dict[str, int] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.setdefault(siblings.read_text() if siblings.exists() else str(cpu), cpu)
    return list(cores.values())


_leasing = threading.Lock()
_leases: dict[int, int] = {}
"""The socket that is held for each leased CPU; the system takes it back when the process ends, however it ends."""


def lease_cores(cpus: list[int]) -> bool:
    """Lease all of these CPUs for this process, or none where another process on this machine has leased one.

    What this process had leased before is given back first.
    """
    release_cores()
    for cpu in cpus:
        lease = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            lease.bind("\0" + CORE_LEASE.format(cpu=cpu))
        except OSError:
            lease.close()
            release_cores()
            return False
        _leases[cpu] = lease.detach()
    return True


def release_cores() -> None:
    """Give back what this process has leased."""
    while _leases:
        os.close(_leases.popitem()[1])


if hasattr(os, "register_at_fork"):
    # a child has none of its parent's threads; the parent keeps its lease
    os.register_at_fork(after_in_child=release_cores)
