"""What a drafter would draft at every place of recorded texts, and what of it stands: a drafter's whole behaviour.

Under matching a draft's fate depends on the text alone. So whatever lengths a simulation chooses, and
whichever places its steps come to, the trace has the draft that the drafter would make there.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from forerun.core.draft import Draft
from forerun.core.file_version import is_version
from forerun.errors import ConfigError
from forerun.plan.acceptance import AcceptanceProfile

VERSION = 1

Ints = npt.NDArray[np.int32]


class TracedDraft(NamedTuple):
    """A draft without its tokens; see `Draft`.

    `right_nodes` are those on the text's path, from the root down.
    """

    num_nodes: int
    parents: tuple[int, ...] | None  # None: a chain
    survival: tuple[float, ...] | None
    source: str | None
    right_nodes: tuple[int, ...]

    def within(self, *, limit: int, depth: int) -> TracedDraft:
        """The draft of the first `limit` nodes, no deeper than `depth`."""
        num_nodes = min(limit, self.num_nodes)
        if self.parents is None:
            num_nodes = min(num_nodes, depth)
        elif self.num_nodes:
            depths = Draft((0,) * num_nodes, self.parents[:num_nodes]).depths()
            # children come after parents, and every prefix of a draft is a draft: cut before the first that is too deep
            num_nodes = next((node for node, found in enumerate(depths) if found > depth), num_nodes)
        if num_nodes <= 0:
            return NOTHING
        if num_nodes == self.num_nodes:
            return self
        return TracedDraft(
            num_nodes,
            None if self.parents is None else self.parents[:num_nodes],
            None if self.survival is None else self.survival[:num_nodes],
            self.source,
            tuple(node for node in self.right_nodes if node < num_nodes),
        )


NOTHING = TracedDraft(0, None, None, None, ())


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedText:
    """A text by its lengths, and the draft at each place of its answer; the first place, which the prompt's own step writes, has none."""

    kind: str  # class of the prompt
    num_prompt_tokens: int
    drafts: Sequence[TracedDraft]  # [tokens of the answer]


@dataclass(frozen=True, kw_only=True, eq=False)
class DraftTrace:
    """The drafts of all texts, in flat arrays.

    T = texts, P = places of all answers, N = nodes of all drafts. Text t has the places from
    `first_places[t]` to before `first_places[t + 1]`, place p the nodes from `first_nodes[p]` on.
    """

    name: str  # of the configuration
    method: str
    num_speculative_tokens: int  # the most nodes of a draft
    kinds: tuple[str, ...]  # [T]
    num_prompt_tokens: Ints  # [T]
    first_places: Ints  # [T + 1]
    first_nodes: Ints  # [P + 1]
    parents: Ints  # [N]
    survival: npt.NDArray[np.float32]  # [N]; nan: the drafter does not know
    is_right: npt.NDArray[np.bool_]  # [N]
    sources: tuple[str, ...]  # that drafts name
    source_of: Ints  # [P] index in `sources`, or -1

    @classmethod
    def of_texts(cls, name: str, method: str, num_speculative_tokens: int, texts: Sequence[TracedText]) -> DraftTrace:
        """Pack the drafts of texts."""
        drafts = [draft for text in texts for draft in text.drafts]
        sources = sorted({draft.source for draft in drafts if draft.source is not None})
        parents: list[int] = []
        survival: list[float] = []
        is_right: list[bool] = []
        for draft in drafts:
            parents += range(-1, draft.num_nodes - 1) if draft.parents is None else draft.parents
            survival += [float("nan")] * draft.num_nodes if draft.survival is None else draft.survival
            right = set(draft.right_nodes)
            is_right += [node in right for node in range(draft.num_nodes)]
        return cls(
            name=name,
            method=method,
            num_speculative_tokens=num_speculative_tokens,
            kinds=tuple(text.kind for text in texts),
            num_prompt_tokens=np.array([text.num_prompt_tokens for text in texts], dtype=np.int32),
            first_places=_starts([len(text.drafts) for text in texts]),
            first_nodes=_starts([draft.num_nodes for draft in drafts]),
            parents=np.array(parents, dtype=np.int32),
            survival=np.array(survival, dtype=np.float32),
            is_right=np.array(is_right, dtype=np.bool_),
            sources=tuple(sources),
            source_of=np.array(
                [-1 if draft.source is None else sources.index(draft.source) for draft in drafts], dtype=np.int32
            ),
        )

    @property
    def has_trees(self) -> bool:
        """Whether any draft is no chain."""
        return not np.array_equal(self._node_depths, self._node_numbers + 1)

    @property
    def num_texts(self) -> int:
        """T."""
        return len(self.kinds)

    def num_answer_tokens(self, text: int) -> int:
        """Tokens of a text's answer."""
        return self._first_places[text + 1] - self._first_places[text]

    def texts_of(self, kind: str | None = None) -> list[int]:
        """The numbers of the texts of a prompt class; None: of all."""
        return [number for number, found in enumerate(self.kinds) if kind is None or found == kind]

    def longest_judged(self, kind: str | None = None) -> int:
        """The longest draft, in nodes, that a text of a class can judge: the text must go on for two tokens more than the draft."""
        longest = max(map(self.num_answer_tokens, self.texts_of(kind)), default=0)
        return min(self.num_speculative_tokens, max(1, longest - 2))

    def draft(self, text: int, place: int) -> TracedDraft:
        """The draft whose first token is at `place` of a text's answer; none after its end."""
        at = self._first_places[text] + place
        if place < 0 or at >= self._first_places[text + 1]:
            return NOTHING
        found = self._unpacked[at]
        if found is None:
            found = self._unpacked[at] = self._unpack(at)
        return found

    def acceptance(self, k: int | None = None, *, kind: str | None = None) -> AcceptanceProfile:
        """What becomes of drafts of at most k nodes in the steps that decode the texts with them, by depth.

        Drafts near the end of a text, which are cut short there, do not count.

        Args:
            k: the most nodes; None: as many as were drafted.
            kind: class of prompts; None: all.

        Raises:
            ConfigError: there is no such class, or its texts have no step.
        """
        limit = self.num_speculative_tokens if k is None else k
        chosen = self.texts_of(kind)
        if not chosen:
            known = ", ".join(sorted(set(self.kinds)))
            raise ConfigError(f"acceptance of {self.name}: got class {kind!r}; must be one of {known}")
        sizes, num_right, deepest = self._cut_to(limit)
        ends, steps = (num_right + 1).tolist(), []
        for text in chosen:
            place, last = self._first_places[text] + 1, self._first_places[text + 1] - 1 - limit
            while place <= last:
                steps.append(place)
                place += ends[place]
        return AcceptanceProfile.of_counts(
            self.method,
            len(steps),
            _num_above(num_right[steps], limit),
            _num_above(deepest[steps], limit),
            num_nodes=int(sizes[steps].sum()),
        )

    def num_steps(self, text: int, k: int) -> int:
        """The steps that write a text after its first token with drafts of at most k nodes."""
        if k not in self._jumps:
            self._jumps[k] = (self._cut_to(k)[1] + 1).tolist()
        jumps, place, end, steps = self._jumps[k], self._first_places[text] + 1, self._first_places[text + 1], 0
        while place < end:
            place += jumps[place]
            steps += 1
        return steps

    @cached_property
    def _jumps(self) -> dict[int, list[int]]:
        return {}

    def _cut_to(self, limit: int) -> tuple[Ints, Ints, Ints]:
        """Of the drafts' first `limit` nodes: how many there are, how many are right, how deep they go, each [P]."""
        num_right, deepest = self._by_length
        sizes = np.minimum(np.diff(self.first_nodes), limit)
        places = np.arange(len(sizes))
        return sizes, num_right[places, sizes], deepest[places, sizes]

    @cached_property
    def _by_length(self) -> tuple[Ints, Ints]:
        """Of the first 0, 1, ... nodes of each draft: how many are right, how deep they go, each [P, longest draft + 1]."""
        sizes = np.diff(self.first_nodes)
        places = np.repeat(np.arange(len(sizes)), sizes)
        shape = (len(sizes), int(sizes.max(initial=0)) + 1)
        is_right, depths = np.zeros(shape, dtype=np.int32), np.zeros(shape, dtype=np.int32)
        is_right[places, self._node_numbers + 1] = self.is_right
        depths[places, self._node_numbers + 1] = self._node_depths
        return np.cumsum(is_right, axis=1, dtype=np.int32), np.maximum.accumulate(depths, axis=1)

    def save(self, path: Path) -> None:
        """Write an .npz file."""
        arrays = {name: getattr(self, name) for name in ARRAYS}
        np.savez_compressed(
            path,
            version=np.array(VERSION),
            name=np.array(self.name),
            method=np.array(self.method),
            num_speculative_tokens=np.array(self.num_speculative_tokens),
            kinds=np.array(self.kinds, dtype=np.str_),
            sources=np.array(self.sources, dtype=np.str_),
            **arrays,
        )

    @classmethod
    def load(cls, path: Path) -> DraftTrace:
        """Read a file that `save` wrote.

        Raises:
            ConfigError: it cannot be read, is of another version, or is damaged.
        """
        try:
            with np.load(path, allow_pickle=False) as found:
                if not is_version(found["version"].item(), VERSION):
                    raise ValueError(f"is of version {found['version'].item()!r:.80}; must be {VERSION}")
                trace = cls(
                    name=str(found["name"]),
                    method=str(found["method"]),
                    num_speculative_tokens=int(found["num_speculative_tokens"]),
                    kinds=tuple(map(str, found["kinds"])),
                    sources=tuple(map(str, found["sources"])),
                    **{name: found[name] for name in ARRAYS},
                )
                trace._check()
                return trace
        except Exception as problem:  # whatever readers of zip, zlib and numpy make of damaged bytes
            why = f"lacks {problem}" if isinstance(problem, KeyError) else str(problem)
            raise ConfigError(f"{path}: {why}; profile again, or give a file that forerun profile wrote") from None

    def _check(self) -> None:
        places, nodes = int(self.first_places[-1]), int(self.first_nodes[-1])
        expected = {
            "num_prompt_tokens": self.num_texts,
            "first_places": self.num_texts + 1,
            "first_nodes": places + 1,
            "source_of": places,
            "parents": nodes,
            "survival": nodes,
            "is_right": nodes,
        }
        for name, length in expected.items():
            if getattr(self, name).shape != (length,):
                raise ValueError(f"{name} has shape {getattr(self, name).shape}; must be ({length},)")
        if (np.diff(self.first_places) < 0).any() or (np.diff(self.first_nodes) < 0).any():
            raise ValueError("places or nodes of a text are not in order")
        if (self.parents < -1).any() or (self.parents >= self._node_numbers).any():
            raise ValueError("a node comes before its parent")

    @cached_property
    def _first_places(self) -> list[int]:
        places: list[int] = self.first_places.tolist()
        return places

    @cached_property
    def _first_nodes(self) -> list[int]:
        nodes: list[int] = self.first_nodes.tolist()
        return nodes

    @cached_property
    def _node_numbers(self) -> Ints:
        """[N], each within its draft."""
        return np.arange(len(self.parents), dtype=np.int32) - np.repeat(
            self.first_nodes[:-1], np.diff(self.first_nodes)
        )

    @cached_property
    def _node_depths(self) -> Ints:
        """[N], 1 for a draft's roots."""
        above = np.arange(len(self.parents)) - self._node_numbers + self.parents
        above[self.parents < 0] = -1
        depths, found = np.zeros_like(self.parents), np.ones_like(self.parents)
        while not np.array_equal(depths, found):
            depths, found = found, np.where(above < 0, 1, found[above] + 1).astype(np.int32)
        return depths

    @cached_property
    def _unpacked(self) -> list[TracedDraft | None]:
        return [None] * self._first_places[-1]

    def _unpack(self, place: int) -> TracedDraft:
        first, last = self._first_nodes[place], self._first_nodes[place + 1]
        if first == last:
            return NOTHING
        parents = tuple(self.parents[first:last].tolist())
        survival = self.survival[first:last]
        source = int(self.source_of[place])
        return TracedDraft(
            last - first,
            None if parents == tuple(range(-1, last - first - 1)) else parents,
            None if np.isnan(survival).any() else tuple(survival.tolist()),
            None if source < 0 else self.sources[source],
            tuple(np.flatnonzero(self.is_right[first:last]).tolist()),
        )


ARRAYS = (
    "num_prompt_tokens",
    "first_places",
    "first_nodes",
    "parents",
    "survival",
    "is_right",
    "source_of",
)


def _starts(lengths: Sequence[int]) -> Ints:
    return np.array(list(itertools.accumulate(lengths, initial=0)), dtype=np.int32)


def _num_above(values: Ints, most: int) -> list[int]:
    """How many values are above 0, 1, ..., `most` - 1."""
    counts = np.bincount(values, minlength=most + 1)
    found: list[int] = (len(values) - np.cumsum(counts))[:most].tolist()
    return found
