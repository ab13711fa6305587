"""GPUs that are not there, for tests of what asks about them."""

from __future__ import annotations

from dataclasses import dataclass, field

from forerun.ops.cuda.system import GPU

H200 = GPU(name="NVIDIA H200", capability=(9, 0), total_bytes=141 << 30, shared_bytes=227 << 10)
A100 = GPU(name="NVIDIA A100", capability=(8, 0), total_bytes=80 << 30, shared_bytes=163 << 10)
T4 = GPU(name="Tesla T4", capability=(7, 5), total_bytes=16 << 30, shared_bytes=63 << 10)


@dataclass
class FakeCuda:
    """A machine with GPUs on which everything fits; a test breaks one thing."""

    torch: str = "2.13.0+cu130"
    torch_cuda: str | None = "13.0"
    driver_cuda: tuple[int, int] | None = (13, 0)
    triton: str | None = "3.7.1"
    gpus: list[GPU] = field(default_factory=lambda: [H200])

    @property
    def num_gpus(self):
        return len(self.gpus)

    def gpu(self, index):
        return self.gpus[index]


@dataclass
class FakeMemory:
    """The memory of a GPU that is not there; `step_bytes` are what a step takes for a while, by the test's own count."""

    total: int
    others: int = 0  # what other processes use
    tensors: int = 0
    cached: int = 0  # what torch keeps beside these
    step_bytes: int = 0

    def __post_init__(self):
        self.most = self.tensors

    def free_and_total(self):
        return self.total - self.others - self.tensors - self.cached, self.total

    def allocated(self):
        return self.tensors

    def reserved(self):
        return self.tensors + self.cached

    def peak(self):
        return self.most

    def reset_peak(self):
        self.most = self.tensors

    def release_unused(self):
        self.cached = 0

    def run_step(self):
        """What a step does to it."""
        self.most = max(self.most, self.tensors + self.step_bytes)
        self.cached = self.step_bytes
