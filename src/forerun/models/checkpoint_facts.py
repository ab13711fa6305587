"""What is known of a checkpoint as a whole, without loading any tensor."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFacts:
    """What is known of a checkpoint.

    Attributes:
        num_bytes: about what all its tensors take as they are loaded.
        is_mixed: whether matrices are stored in several ways, blocks among them; each then stays as it suited it.
        name: what it is called in errors.
        remedy: what to do where its tensors and the configuration do not fit each other.
    """

    num_bytes: int
    is_mixed: bool = False
    name: str = "checkpoint"
    remedy: str = "use the config.json that belongs to these weights"
