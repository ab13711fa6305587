"""How the processes of a group exchange tensors: through torch.distributed, by NCCL between GPUs and by gloo elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed
import torch.nn.functional as F
from torch import Tensor

from forerun.errors import WorkerError

c10d: Any = torch.distributed  # its types leave out what is made here
HOST = "127.0.0.1"
CONNECT_TIME = timedelta(seconds=120)  # that ranks wait for each other, and that gloo waits in an exchange


class Collectives(Protocol):
    """Exchanges that every rank of a group calls in the same order."""

    rank: int
    num_ranks: int

    def gather(self, part: Tensor, widths: Sequence[int]) -> Tensor:
        """Put the columns of all ranks side by side: [T, widths[rank]] of each rank -> [T, sum(widths)] on all.

        Raises:
            WorkerError: a rank has ended.
        """
        ...

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Write rank 0's values into the tensor of every other rank, which has the same shape and dtype; return it.

        Raises:
            WorkerError: a rank has ended.
        """
        ...

    def finish(self) -> None:
        """Wait until the device has done what was asked of it; exchanges between GPUs return before."""
        ...


class TorchCollectives:
    """`Collectives` of processes of one machine; no process group of the caller's own is touched.

    port: on this machine, where rank 0 waits for the others.
    """

    def __init__(self, device: torch.device, *, rank: int, num_ranks: int, port: int = 0) -> None:
        """Exchange tensors on `device`, once all ranks have called `connect`; rank 0 takes a free port where it is 0.

        Raises:
            WorkerError: rank 0 is not there.
        """
        self.rank = rank
        self.num_ranks = num_ranks
        self._device = device
        self._group: Any = None
        try:
            self._store = c10d.TCPStore(
                *(HOST, port, num_ranks), is_master=rank == 0, wait_for_workers=False, timeout=CONNECT_TIME
            )
        except RuntimeError as error:
            raise WorkerError(f"tensor parallel: rank {rank} finds no rank 0 at port {port} ({error})") from error
        self.port = self._store.port

    def connect(self) -> None:
        """Wait for the other ranks.

        Raises:
            WorkerError: they do not come.
        """
        try:
            if self._device.type == "cuda":
                nccl = c10d.ProcessGroupNCCL.Options()
                self._group = c10d.ProcessGroupNCCL(self._store, self.rank, self.num_ranks, nccl)
            else:
                gloo = c10d.ProcessGroupGloo._Options()
                gloo._devices = [c10d.ProcessGroupGloo.create_device(hostname=HOST)]
                gloo._timeout = CONNECT_TIME
                self._group = c10d.ProcessGroupGloo(self._store, self.rank, self.num_ranks, gloo)
        except RuntimeError as error:
            raise WorkerError(f"tensor parallel: rank {self.rank} met no other ranks ({error}); start again") from error

    def gather(self, part: Tensor, widths: Sequence[int]) -> Tensor:
        """See `Collectives`; parts are padded to the widest."""
        num_rows, widest = len(part), max(widths)
        if not num_rows:
            return part.new_empty(0, sum(widths))
        padded = F.pad(part, (0, widest - widths[self.rank])).contiguous()
        gathered = part.new_empty(self.num_ranks * num_rows, widest)
        self._wait_for("_allgather_base", gathered, padded)
        parts = gathered.view(self.num_ranks, num_rows, widest)
        return torch.cat([own[:, :width] for own, width in zip(parts, widths, strict=True)], dim=1)

    def broadcast(self, tensor: Tensor) -> Tensor:
        """See `Collectives`; the tensor must be contiguous."""
        if tensor.numel():
            self._wait_for("broadcast", tensor, 0)
        return tensor

    def finish(self) -> None:
        """See `Collectives`."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def abort(self) -> None:
        """Let whatever waits for a rank that is gone fail; from any thread."""
        if self._group is not None:
            self._group.abort()

    def _wait_for(self, name: str, *arguments: Any) -> None:
        try:
            getattr(self._group, name)(*arguments).wait()
        except RuntimeError as error:
            raise WorkerError(f"tensor parallel: rank {self.rank} has lost another rank ({error})") from error
