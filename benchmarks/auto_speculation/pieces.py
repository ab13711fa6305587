"""The pieces of a run, which a file keeps, so that a run may stop after any of them and go on later."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.auto_speculation.answering import Answers
from forerun.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One configuration's answers to one group."""

    group: int
    config: str
    seconds: float
    decode_seconds: float
    num_tokens: int
    num_decode_tokens: int
    num_steps: int  # of a sequence each
    num_draft_tokens: int
    num_accepted_tokens: int
    num_failed_drafts: int
    drafted_by: dict[str, list[int]]  # drafter -> its drafted and accepted tokens
    num_differing: int  # requests whose text is not plain decoding's
    text: str  # digest of all token ids, as texts are not published

    @classmethod
    def of(cls, answers: Answers, *, group: int, config: str, plain: Answers) -> Measurement:
        """The figures of `answers`, whose texts are compared with those of `plain`."""
        counts = answers.speculation
        return cls(
            group=group,
            config=config,
            seconds=answers.seconds,
            decode_seconds=answers.decode_seconds,
            num_tokens=answers.num_tokens,
            num_decode_tokens=answers.num_decode_tokens,
            num_steps=counts.num_steps,
            num_draft_tokens=counts.num_draft_tokens,
            num_accepted_tokens=counts.num_accepted_tokens,
            num_failed_drafts=answers.num_failed_drafts,
            drafted_by={
                name: [one.num_draft_tokens, one.num_accepted_tokens] for name, one in sorted(counts.by_drafter.items())
            },
            num_differing=sum(a != b for a, b in zip(answers.texts, plain.texts, strict=True)),
            text=hashlib.sha256(json.dumps(answers.texts).encode()).hexdigest()[:16],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One round of one workload with some of the configurations, answered in turn group by group.

    `gigabytes_per_second` is the memory's bandwidth right before.
    """

    workload: str
    round: int
    configs: dict[str, dict[str, Any] | None]  # name -> speculative_config
    num_groups: int
    num_running: int
    gigabytes_per_second: float
    measurements: list[Measurement] = field(repr=False)


@dataclass(frozen=True, slots=True)
class PieceFile:
    """A JSON file with the circumstances of a run (model, machine, ...) and its pieces so far."""

    path: Path

    def read(self) -> list[Piece]:
        """The pieces; none if there is no file yet."""
        if not self.path.exists():
            return []
        return [
            Piece(**{**piece, "measurements": [Measurement(**one) for one in piece["measurements"]]})
            for piece in self._json()["pieces"]
        ]

    def circumstances(self) -> dict[str, Any]:
        """What the run was about; empty if there is no file yet."""
        if not self.path.exists():
            return {}
        return {name: value for name, value in self._json().items() if name != "pieces"}

    def check(self, circumstances: dict[str, Any], configs: Mapping[str, Mapping[str, Any] | None]) -> None:
        """Refuse to add to pieces that were measured otherwise.

        Raises:
            ConfigError: there are such pieces; the error says what differs.
        """
        here: list[tuple[str, Any, Any]] = [
            (name, before, circumstances.get(name)) for name, before in self.circumstances().items()
        ]
        here += [
            (f"the configuration {name}", before, configs[name])
            for piece in self.read()
            for name, before in piece.configs.items()
            if name in configs
        ]
        for name, before, now in here:
            if before != now:
                raise ConfigError(
                    f"{self.path}: has {name} {before!r:.200}, not {now!r:.200}; measure into another file"
                )

    def add(self, piece: Piece, circumstances: dict[str, Any]) -> None:
        """Write the file anew with one more piece; an interruption leaves the file as it was."""
        self.write([*self.read(), piece], circumstances)

    def write(self, pieces: Sequence[Piece], circumstances: dict[str, Any]) -> None:
        """Write all pieces."""
        lines = ",\n".join(_piece_lines(pieces))
        head = json.dumps(circumstances, indent=1).removesuffix("\n}")
        beside = self.path.with_suffix(".part")
        beside.write_text(f'{head},\n "pieces": [\n{lines}\n ]\n}}\n')
        beside.replace(self.path)

    def _json(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.path.read_text())
        return found


def _piece_lines(pieces: Sequence[Piece]) -> Iterator[str]:
    """Each piece as JSON with a line for each measurement."""
    for piece in pieces:
        record = asdict(piece)
        measurements = ",\n".join(f"   {json.dumps(one)}" for one in record.pop("measurements"))
        yield f'  {json.dumps(record)[:-1]}, "measurements": [\n{measurements}\n  ]}}'
