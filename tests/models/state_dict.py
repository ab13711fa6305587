"""A checkpoint in memory."""

from dataclasses import replace

from safetensors.torch import load_file

from forerun.models.checkpoint_facts import CheckpointFacts
from forerun.ops.block_weight import BlockWeight


class InMemoryCheckpoint:
    """Tensors by name, from a dict that a test may spoil."""

    def __init__(self, tensors):
        self.tensors = dict(tensors)

    @property
    def facts(self):
        is_mixed = any(isinstance(tensor, BlockWeight) for tensor in self.tensors.values())
        return CheckpointFacts(num_bytes=sum(tensor.nbytes for tensor in self.tensors.values()), is_mixed=is_mixed)

    def names(self):
        return frozenset(self.tensors)

    def shape(self, name):
        return tuple(self.tensors[name].shape)

    def load(self, name):
        return self.tensors[name]


class MixedCheckpoint(InMemoryCheckpoint):
    """Matrices that are kept as they are, as beside others in blocks."""

    @property
    def facts(self):
        return replace(super().facts, is_mixed=True)


def read_checkpoint(folder):
    """The safetensors of a tiny model."""
    return InMemoryCheckpoint(load_file(folder / "model.safetensors"))
