"""Times products on the GPU at hand, and looks whether a row keeps its bits; for `forerun tune-kernels`."""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.ops.cuda.kernels import matmul
from forerun.ops.cuda.tiles import Shape, Tiles, tiles_instead

LEAST_BYTES = 400e6  # of the weights that one measurement reads in turn: several times the cache
REPEATS = 10
COUNTS = (1, 2, 15, 16, 17, 32, 33, 64)
"""Numbers of rows at which bits are compared: around those at which tiles change."""


class CudaMeter:
    """Measures bf16 products on a GPU, in CUDA graphs; has not run on hardware yet.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._shape: Shape | None = None
        self._weights: list[Tensor] = []

    def microseconds(self, shape: Shape, tiles: Tiles, num_rows: int) -> float:
        """See `bench.kernel_tuning.Meter`; infinite where the cut cannot be compiled or launched."""
        weights, x = self._weights_of(shape), self._normal(num_rows, shape[1])
        output = torch.empty(num_rows, shape[0], device=self._device, dtype=torch.bfloat16)
        with tiles_instead(shape, tiles):
            try:
                matmul.linear(x, weights[0], output)
                torch.cuda.synchronize(self._device)
            except Exception:  # more shared memory or registers than there are, which triton has many names for
                return float("inf")
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for weight in weights:
                    matmul.linear(x, weight, output)
        times = [self._replayed(graph) for _ in range(REPEATS)]
        return min(times) / len(weights)

    def keeps_bits(self, shape: Shape, tiles: Tiles) -> bool:
        """See `bench.kernel_tuning.Meter`."""
        weight, x = self._weights_of(shape)[0], self._normal(max(COUNTS), shape[1])

        def product(rows: Tensor) -> Tensor:
            output = torch.empty(len(rows), shape[0], device=self._device, dtype=torch.float32)
            matmul.linear(rows.contiguous(), weight, output)
            return output

        with tiles_instead(shape, tiles):
            alone = torch.cat([product(row[None]) for row in x])
            return all(torch.equal(product(x[:count]), alone[:count]) for count in COUNTS)

    def _replayed(self, graph: torch.cuda.CUDAGraph) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return 1000 * float(begin.elapsed_time(end))

    def _weights_of(self, shape: Shape) -> list[Tensor]:
        """Weights of a shape, so many that none stays in the cache from one time to the next."""
        if self._shape != shape:
            self._weights.clear()
            count = max(2, round(LEAST_BYTES / (2 * shape[0] * shape[1])))
            self._weights += [self._normal(*shape, seed=i) for i in range(count)]
            self._shape = shape
        return self._weights

    def _normal(self, *shape: int, seed: int = 0) -> Tensor:
        source = torch.Generator(self._device).manual_seed(seed)
        return torch.randn(shape, generator=source, device=self._device, dtype=torch.bfloat16) / 50
