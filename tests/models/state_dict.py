"""A checkpoint in memory."""

from safetensors.torch import load_file

from forerun.ops.block_weight import BlockWeight


class InMemoryCheckpoint:
    """Tensors by name, from a dict that a test may spoil."""

    def __init__(self, tensors):
        self.tensors = dict(tensors)

    @property
    def has_blocks(self):
        return any(isinstance(tensor, BlockWeight) for tensor in self.tensors.values())

    def names(self):
        return frozenset(self.tensors)

    def shape(self, name):
        return tuple(self.tensors[name].shape)

    def load(self, name):
        return self.tensors[name]


def read_checkpoint(folder):
    """The safetensors of a tiny model."""
    return InMemoryCheckpoint(load_file(folder / "model.safetensors"))
