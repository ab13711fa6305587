"""Several packed weights of the same rows as one: the outputs of each, one weight after the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forerun.ops.native.formats.base import PackedWeight, StoredFormat
from forerun.ops.native.library import Kernels
from forerun.ops.native.structs import TILE


class JoinedFormat(StoredFormat):
    """No data of its own: every part is in its own format, and all take rows of one dtype."""

    def join(self, parts: Sequence[PackedWeight]) -> PackedWeight:
        """One weight of several; all but the last have whole tiles of outputs."""
        outputs = sum(part.outputs for part in parts)
        return PackedWeight(
            format=self,
            data=torch.empty(-(-outputs // TILE), 0),
            outputs=outputs,
            inputs=parts[0].inputs,
            parts=tuple(parts),
        )

    def unpack(self, packed: PackedWeight) -> Tensor:
        """See `StoredFormat`."""
        return torch.cat([part.unpack().float() for part in packed.parts])

    def select(self, kernels: Kernels, packed: PackedWeight, outputs: Tensor) -> PackedWeight:  # noqa: ARG002
        """See `StoredFormat`.

        Raises:
            TypeError: always; only the weights of layers are joined, and outputs are chosen of heads.
        """
        raise TypeError("outputs cannot be chosen of a joined weight")


JOINED = JoinedFormat(name="joined", kernel_id=4, activations=torch.bfloat16)
