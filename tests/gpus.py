"""GPUs that are not there, for tests of what asks about them."""

from __future__ import annotations

from dataclasses import dataclass, field

from forerun.ops.cuda.system import GPU

H200 = GPU(name="NVIDIA H200", capability=(9, 0), total_bytes=141 << 30)
A100 = GPU(name="NVIDIA A100", capability=(8, 0), total_bytes=80 << 30)
T4 = GPU(name="Tesla T4", capability=(7, 5), total_bytes=16 << 30)


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
