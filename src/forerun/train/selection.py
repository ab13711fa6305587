"""What is learnt of the texts: which of them, which of their places, and which tokens the head can draft."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from forerun.errors import ConfigError
from forerun.models.tokenizer import Tokenizer
from forerun.train.texts import WrittenText

NGRAM = 8  # words in a row that a text must not share with an excluded file
MOST_PERIOD = 32  # tokens of what is repeated in a loop
LEAST_COVERAGE = 0.95
LEAST_COVERAGE_TAKEN = 0.9  # by a draft vocabulary that was chosen for other texts
NUM_ALWAYS = 3  # ids from 0 that are always drafted: the special tokens of most vocabularies
NO_JSON_SPACE = re.compile(r"[^ \t\n\r]")
HELD_OUT_EVERY = 32  # conversations; of fewer than so many one


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedText:
    """A text, by its number in the run, and the places at which a head learns what the target predicts for the next one.

    The text's last token is no place: the engine that writes it never computes what would follow.
    """

    number: int
    token_ids: NDArray[np.int64]
    places: NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The texts of a run, divided, and what was left out.

    `draft_ids` [V] are the tokens that the head can draft, ascending; `coverage` is their share of what is learnt.
    """

    learned: Sequence[LearnedText]
    held_out: Sequence[WrittenText]
    draft_ids: NDArray[np.int64]
    coverage: float
    num_empty: int
    num_repeated: int
    num_excluded: int

    @property
    def num_tokens(self) -> int:
        """Tokens of the texts that are learnt from, prompts included."""
        return sum(len(text.token_ids) for text in self.learned)

    @property
    def num_places(self) -> int:
        """Places at which something is learnt."""
        return sum(len(text.places) for text in self.learned)


def prompt_of(text: WrittenText) -> NDArray[np.uint32]:
    """What comes before the first token that the target wrote."""
    return text.token_ids[: text.spans[0][0]]


def whole_text(text: WrittenText) -> NDArray[np.uint32]:
    """All of a text: by this answers are known whose prompts nobody kept, since what is read of them begins like others."""
    return text.token_ids


def select(
    texts: Iterable[WrittenText],
    *,
    vocab_size: int,
    num_draft: int,
    always: Iterable[int] = (),
    draft_ids: NDArray[np.int64] | None = None,
    tokenizer: Tokenizer | None = None,
    excluded: frozenset[tuple[str, ...]] = frozenset(),
    known_by: Callable[[WrittenText], NDArray[np.uint32]] = prompt_of,
) -> Selection:
    """Select what is learnt, a function of the set of texts: their order in the file does not matter.

    Args:
        texts: what the target wrote.
        vocab_size: of the target.
        num_draft: how many tokens the head can draft.
        always: tokens that are drafted however rare they are, such as those that end a text.
        draft_ids: the tokens that a head which was trained before can draft; None chooses them.
        tokenizer: decodes texts to compare them with `excluded`.
        excluded: n-grams of words; texts with one of them are left out.
        known_by: the tokens of a text by which a repeated one is known.

    Raises:
        ConfigError: nothing is left to learn from, or too few of its tokens can be drafted.
    """
    ordered = sorted(texts, key=lambda text: text.number)
    kept: list[WrittenText] = []
    known: set[bytes] = set()
    num_empty = num_repeated = num_excluded = 0
    for text in ordered:
        if not text.spans:
            num_empty += 1
            continue
        own = known_by(text).tobytes()
        if own in known:
            num_repeated += 1
        elif excluded and tokenizer is not None and _shares_ngram(text, tokenizer, excluded):
            num_excluded += 1
        else:
            known.add(own)
            kept.append(text)
    held_out = [] if len(kept) < 2 else kept[min(HELD_OUT_EVERY, len(kept)) - 1 :: HELD_OUT_EVERY]
    numbers = {text.number for text in held_out}
    learned = [_learned(text, places) for text in kept if text.number not in numbers and len(places := _places(text))]
    if not learned:
        raise ConfigError(
            f"texts: none is left to learn from ({len(ordered)} written, {num_empty} without an answer, {num_repeated} "
            f"repeated, {num_excluded} excluded); write more"
        )
    counts = np.zeros(vocab_size, dtype=np.int64)
    for one in learned:
        counts += np.bincount(one.token_ids[one.places + 1], minlength=vocab_size)
    least = LEAST_COVERAGE if draft_ids is None else LEAST_COVERAGE_TAKEN
    if draft_ids is None:
        draft_ids = _draft_vocabulary(counts, num_draft=num_draft, always=always)
    return Selection(
        learned=learned,
        held_out=held_out,
        draft_ids=draft_ids,
        coverage=_coverage(counts, draft_ids, least=least),
        num_empty=num_empty,
        num_repeated=num_repeated,
        num_excluded=num_excluded,
    )


def ngrams(text: str) -> set[tuple[str, ...]]:
    """Return all runs of `NGRAM` words of a text, in lower case and without punctuation."""
    words = re.findall(r"\w+", text.lower())
    return set(zip(*(words[first:] for first in range(NGRAM)), strict=False))


def read_excluded(paths: Sequence[Path]) -> frozenset[tuple[str, ...]]:
    """Read the n-grams of files of prompts: all strings of a .json or .jsonl file, all lines of any other.

    Raises:
        ConfigError: a file cannot be read, or excludes nothing.
    """
    found: set[tuple[str, ...]] = set()
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8-sig")
            is_json = path.suffix in (".json", ".jsonl")
            strings = _strings(list(_json_values(text))) if is_json else text.split("\n")
        except (OSError, ValueError) as error:
            raise ConfigError(f"--exclude: cannot read {path} ({error}); give a .jsonl or text file") from None
        of_file = set().union(*map(ngrams, strings))
        if not of_file:
            raise ConfigError(
                f"--exclude: {path} has no string of {NGRAM} words, so that it excludes nothing; give whole prompts"
            )
        found |= of_file
    return frozenset(found)


def loops(token_ids: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Mark the tokens of a text from the third time on that the same few tokens are repeated, [S]."""
    found = np.zeros(len(token_ids), dtype=bool)
    for period in range(1, min(MOST_PERIOD, len(token_ids) - 1) + 1):
        is_equal = token_ids[period:] == token_ids[:-period]
        index = np.arange(len(is_equal))
        last_other = np.maximum.accumulate(np.where(is_equal, -1, index))
        found[period:] |= index - last_other > max(2 * period, 8)
    return found


def _shares_ngram(text: WrittenText, tokenizer: Tokenizer, excluded: frozenset[tuple[str, ...]]) -> bool:
    whole = tokenizer.decode(text.token_ids.tolist(), skip_special_tokens=False)
    return not excluded.isdisjoint(ngrams(whole))


def _places(text: WrittenText) -> NDArray[np.int64]:
    """Return the places of answers whose next token is of the same answer too, without loops."""
    token_ids = text.token_ids.astype(np.int64)
    is_learned = np.zeros(len(token_ids), dtype=bool)
    for start, end in text.spans:
        is_learned[start : end - 1] = True
    is_learned[:-1] &= ~loops(token_ids)[1:]
    return is_learned.nonzero()[0]


def _learned(text: WrittenText, places: NDArray[np.int64]) -> LearnedText:
    """A text up to the last token that says something about a place: what follows, as a loop, is not computed."""
    ids = text.token_ids[: places[-1] + 2].astype(np.int64)
    return LearnedText(number=text.number, token_ids=ids, places=places)


def _draft_vocabulary(counts: NDArray[np.int64], *, num_draft: int, always: Iterable[int]) -> NDArray[np.int64]:
    """The most frequent tokens of `counts` [vocab_size], and some that are always drafted, ascending.

    Raises:
        ConfigError: there is no room for the latter.
    """
    if num_draft >= len(counts):
        return np.arange(len(counts))
    fixed = np.unique([*range(NUM_ALWAYS), *always])
    if num_draft < len(fixed):
        raise ConfigError(
            f"--draft-vocab-size: got {num_draft}; must be {len(fixed)} or more: special tokens and those that end a text are "
            "always drafted"
        )
    order = np.argsort(-counts, kind="stable")
    others = order[~np.isin(order, fixed)][: num_draft - len(fixed)]
    return np.sort(np.concatenate([fixed, others]))


def _coverage(counts: NDArray[np.int64], draft_ids: NDArray[np.int64], *, least: float) -> float:
    """The share of the tokens in `counts` [vocab_size] that can be drafted.

    Raises:
        ConfigError: it is below `least`.
    """
    coverage = float(counts[draft_ids].sum() / counts.sum())
    if coverage < least:
        raise ConfigError(
            f"--draft-vocab-size: {len(draft_ids)} tokens are {coverage:.1%} of what the target wrote; "
            f"at least {least:.0%} are needed; give more, or begin anew"
        )
    return coverage


def _json_values(text: str) -> Iterator[object]:
    """The JSON values of a text, one after the other: one for each line, or a single one over many lines."""
    decoder, place = json.JSONDecoder(), 0
    while found := NO_JSON_SPACE.search(text, place):
        value, place = decoder.raw_decode(text, found.start())
        yield value


def _strings(value: object) -> list[str]:
    """All strings in a JSON value."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [string for item in value for string in _strings(item)] if isinstance(value, list) else []
