"""What a verifier answers about one sequence."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from forerun.errors import ErrorKind


class Origin(StrEnum):
    """How a token came to be in the output (the glossary of rejection sampling).

    accepted: drafted, and the target agreed. recovered: the target's own token where it disagreed
    with the draft. bonus: the target's own token after the whole draft (or after an empty one).
    """

    ACCEPTED = "accepted"
    RECOVERED = "recovered"
    BONUS = "bonus"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The accepted path of a draft and the one token of the target's own that follows it.

    `accepted` lists node indices from the root down. `error`, if set, says why this sequence could
    not be judged (a failing logits processor, say), and `error_kind` whose mistake that is; the rest is
    then meaningless.
    """

    accepted: tuple[int, ...]
    token_id: int
    error: str | None = None
    error_kind: ErrorKind | None = None
