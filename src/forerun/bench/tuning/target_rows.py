"""What a target held likely after drafted tokens that did not stand: noted while it is recorded, for drafters that learn from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from forerun.core.draft import Draft
from forerun.core.sequence import Sequence
from forerun.core.whole_file import whole_file
from forerun.drafters.base import DraftContext, Drafter, TargetInfo, VerifiedRows
from forerun.drafters.lookup.drafter import LookupDrafter
from forerun.errors import ConfigError

NUM_DRAFTED = 7
"""Nodes of the drafts by which rows are noted: more of them bring a simulation one percent nearer to a real run, and take twice as long."""

RECORDED_AT_ONCE = 8
"""Prompts that are answered at once while the target is recorded, so that a step's drafted rows stay cheap."""

TABLE_BYTES = 64_000_000


class Candidates(NamedTuple):
    """The target's likeliest next tokens of a row, likeliest first, and their logits."""

    ids: npt.NDArray[np.int32]
    logits: npt.NDArray[np.float32]


@dataclass(slots=True)
class TargetRows:
    """The candidates of rows by their token and the token before it, which is what tables of such rows go by.

    Of several rows with the same two tokens the last one is kept.
    """

    found: dict[tuple[int, int], Candidates] = field(default_factory=dict)
    _by_token: dict[int, Candidates] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._by_token.update((token_id, one) for (_, token_id), one in self.found.items())

    def note(self, rows: VerifiedRows) -> None:
        """Keep the rows of a step."""
        keys = zip(rows.previous_ids.tolist(), rows.token_ids.tolist(), strict=True)
        for number, key in enumerate(keys):
            one = Candidates(rows.candidate_ids[number].copy(), rows.candidate_logits[number].copy())
            self.found[key] = self._by_token[key[1]] = one

    def after(self, previous_id: int, token_id: int) -> Candidates | None:
        """What the target said after two tokens, else after the second one elsewhere; None where it came nowhere."""
        found = self.found.get((previous_id, token_id))
        return self._by_token.get(token_id) if found is None else found

    def save(self, path: Path) -> None:
        """Write an .npz file, whole or not at all."""
        values = list(self.found.values())
        with whole_file(path) as part:
            np.savez_compressed(
                part,
                keys=np.array(list(self.found), dtype=np.int64).reshape(-1, 2),
                ids=np.array([one.ids for one in values], dtype=np.int32),
                logits=np.array([one.logits for one in values], dtype=np.float32),
            )

    @classmethod
    def load(cls, path: Path) -> TargetRows:
        """Read a file that `save` wrote.

        Raises:
            ConfigError: it cannot be read.
        """
        try:
            with np.load(path, allow_pickle=False) as file:
                keys, ids, logits = file["keys"].tolist(), file["ids"], file["logits"]
            return cls({(key[0], key[1]): Candidates(ids[number], logits[number]) for number, key in enumerate(keys)})
        except Exception as error:  # whatever readers of zip, zlib and numpy make of damaged bytes
            raise ConfigError(
                f"{path}: cannot be read ({error!r}); delete it and the recording, to make them anew"
            ) from None


def noting_drafter(rows: TargetRows) -> type[Drafter]:
    """A drafter class whose drafts go wherever look-ups may lead, and which notes what the target says there."""

    class NotingDrafter:
        needs: frozenset[str] = frozenset()

        def __init__(self, target: TargetInfo) -> None:
            self._lookup = LookupDrafter(target, table_bytes=TABLE_BYTES, pool_bytes=TABLE_BYTES)
            self.num_candidates = self._lookup.num_candidates

        def start(self, sequence: Sequence) -> None:
            self._lookup.start(sequence)

        def learn(self, verified: VerifiedRows) -> None:
            rows.note(verified)
            self._lookup.learn(verified)

        def propose(self, context: DraftContext) -> list[Draft]:
            return self._lookup.propose(context)

        def stop(self, sequence: Sequence) -> None:
            self._lookup.stop(sequence)

    return NotingDrafter
