"""Texts that a target wrote, with its likeliest tokens at each place: a file of JSON lines, packed if it ends in .gz.

The first line is an object about all texts: "recording" (the format's version, 1), "model", "dtype",
"kernels", "vocab_size", "max_tokens" and "load_format". Each further line is a text: "kind", "temperature", "prompt" and
"answer" (token ids), and for each token of the answer the target's likeliest tokens in its place, likeliest
first: "top" (ids) and "logprobs" (nats, before any sampling rule).
"""

from __future__ import annotations

import gzip
import itertools
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TextIO, cast

import numpy as np
import numpy.typing as npt

from forerun.bench.instruments import Progress, no_progress
from forerun.bench.machine import describe_kernels
from forerun.bench.offline import check_outputs
from forerun.core.file_version import is_version
from forerun.core.integers import is_integer
from forerun.core.outputs import RequestOutput, TokenLogprobs
from forerun.core.sampling_params import SamplingParams
from forerun.core.whole_file import whole_file
from forerun.errors import ConfigError
from forerun.llm import LLM

VERSION = 1
NUM_CANDIDATES = 8
DECIMALS = 3  # of logprobs in the file


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedText:
    """A text, and at each of its places the target's candidates, likeliest first."""

    kind: str
    temperature: float
    prompt_ids: list[int]
    answer_ids: list[int]
    candidate_ids: npt.NDArray[np.int32]  # [tokens of the answer, candidates]
    candidate_logprobs: npt.NDArray[np.float32]

    def to_json(self) -> dict[str, Any]:
        """The text as a line of the file."""
        return {
            "kind": self.kind,
            "temperature": self.temperature,
            "prompt": self.prompt_ids,
            "answer": self.answer_ids,
            "top": self.candidate_ids.tolist(),
            "logprobs": [[round(value, DECIMALS) for value in row] for row in self.candidate_logprobs.tolist()],
        }

    @classmethod
    def from_json(cls, line: Mapping[str, Any], *, vocab_size: int) -> RecordedText:
        """The text of a line.

        Raises:
            KeyError: a key is missing.
            TypeError: a value is of another type.
            ValueError: a token is none of the vocabulary, or candidates and answer do not fit together.
        """
        if not isinstance(line["kind"], str) or type(line["temperature"]) not in (int, float):
            raise TypeError('"kind" must be a text and "temperature" a number')
        text = cls(
            kind=line["kind"],
            temperature=line["temperature"],
            prompt_ids=_token_ids(line["prompt"], vocab_size),
            answer_ids=_token_ids(line["answer"], vocab_size),
            candidate_ids=np.array([_token_ids(row, vocab_size) for row in line["top"]], dtype=np.int32),
            candidate_logprobs=np.array(line["logprobs"], dtype=np.float32),
        )
        shape = text.candidate_ids.shape
        if len(shape) != 2 or shape[0] != len(text.answer_ids) or text.candidate_logprobs.shape != shape:
            raise ValueError('"top" and "logprobs" must have a list of the same length for each token of the answer')
        return text


def _token_ids(given: Any, vocab_size: int) -> list[int]:
    """The list of one token or more that is given.

    Raises:
        ValueError: it is something else.
    """
    is_list = isinstance(given, list) and len(given) > 0
    if not is_list or not all(type(one) is int and 0 <= one < vocab_size for one in given):
        raise ValueError(
            f'"prompt", "answer" and each of "top" must have one token or more, each of 0 to {vocab_size - 1}'
        )
    ids: list[int] = given
    return ids


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingInfo:
    """What wrote the texts of a recording."""

    model: str
    dtype: str
    kernels: str
    vocab_size: int
    max_tokens: int
    load_format: str = "auto"  # of the weights; "dummy": they were made up

    def rounded(self, what: str) -> str | None:
        """The format that "weights" or "activations" were rounded to, which the kernels name after it; None: to no other."""
        parts = self.kernels.split(", ")
        return next((part.removesuffix(f" {what}") for part in parts if part.endswith(f" {what}")), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """All texts of a file."""

    info: RecordingInfo
    texts: list[RecordedText]

    @property
    def by_kind(self) -> dict[str, list[RecordedText]]:
        """Kind -> its texts, in the order in which they were written."""
        kinds: dict[str, list[RecordedText]] = {}
        for text in self.texts:
            kinds.setdefault(text.kind, []).append(text)
        return kinds

    @property
    def prompts(self) -> dict[str, list[list[int]]]:
        """Kind of prompts -> token ids of each, which were answered at all temperatures."""
        first = self.texts[0].temperature
        of_first = named_after("", first)
        kinds: dict[str, list[list[int]]] = {}
        for text in self.texts:
            if text.temperature == first:
                kinds.setdefault(text.kind.removesuffix(of_first), []).append(text.prompt_ids)
        return kinds

    @property
    def seeds(self) -> list[int]:
        """The seed of each text's request: its number in its kind."""
        numbers: dict[str, Iterator[int]] = {}
        return [next(numbers.setdefault(text.kind, itertools.count())) for text in self.texts]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """A text that the target is asked for."""

    kind: str
    temperature: float
    seed: int
    prompt_ids: Sequence[int]

    def is_answered_by(self, text: RecordedText) -> bool:
        """Whether a text is the answer."""
        mine = (self.kind, self.temperature, list(self.prompt_ids))
        return mine == (text.kind, text.temperature, text.prompt_ids)


def record(
    llm: LLM,
    prompts: Mapping[str, Sequence[Sequence[int]]],
    *,
    max_tokens: int,
    temperatures: Sequence[float] = (0.0,),
    unfinished: Path | None = None,
    progress: Progress = no_progress,
) -> Recording:
    """Let the target answer every prompt, in batches of as many sequences as the engine runs.

    Args:
        llm: the target; drafts change nothing but the time that this takes.
        prompts: kind -> token ids of each prompt.
        max_tokens: of an answer, at most.
        temperatures: each prompt is answered once at each; the kinds of sampled answers are named after
            theirs. The seed of a prompt is its number in its kind.
        unfinished: where the texts of all whole batches are kept if the recording is interrupted or fails; it goes on
            from there, and leaves the file to the caller.
        progress: is called with the state of the work.

    Raises:
        RequestError: a prompt does not fit, or failed.
        ConfigError: `unfinished` is a recording of other texts, or cannot be read.
    """
    asked = [
        _Asked(kind=named_after(kind, temperature), temperature=temperature, seed=seed, prompt_ids=ids)
        for temperature, (kind, of_kind) in itertools.product(temperatures, prompts.items())
        for seed, ids in enumerate(of_kind)
    ]
    info = RecordingInfo(
        model=llm.settings.model,
        dtype=str(llm.dtype).removeprefix("torch."),
        kernels=describe_kernels(llm),
        vocab_size=llm.vocab_size,
        max_tokens=max_tokens,
        load_format=llm.settings.load_format,
    )
    texts: list[RecordedText] = []
    if unfinished is not None and unfinished.exists():
        texts = _read_unfinished(unfinished, info, asked)
    try:
        for start in range(len(texts), len(asked), llm.settings.max_num_seqs):
            progress(f"{start} of {len(asked)} texts")
            texts += _answers(llm, asked[start : start + llm.settings.max_num_seqs], max_tokens=max_tokens)
    except BaseException:
        if unfinished is not None and texts:
            write_recording(Recording(info=info, texts=texts), unfinished)
        raise
    return Recording(info=info, texts=texts)


def _answers(llm: LLM, batch: Sequence[_Asked], *, max_tokens: int) -> list[RecordedText]:
    """What the target answers."""
    params = [
        SamplingParams(
            temperature=one.temperature,
            max_tokens=max_tokens,
            logprobs=NUM_CANDIDATES,
            seed=one.seed,
            detokenize=False,
        )
        for one in batch
    ]
    outputs = llm.generate([one.prompt_ids for one in batch], params, use_tqdm=False)
    check_outputs(outputs)
    return [_recorded(output, one.kind, one.temperature) for output, one in zip(outputs, batch, strict=True)]


def _read_unfinished(path: Path, info: RecordingInfo, asked: Sequence[_Asked]) -> list[RecordedText]:
    """The texts of a recording that was interrupted.

    Raises:
        ConfigError: they are not the first ones of those that are asked for, or something else wrote them.
    """
    begun = read_recording(path)
    others = [f"{name} {had}" for name, had in asdict(begun.info).items() if had != getattr(info, name)]
    if len(begun.texts) > len(asked) or not all(map(_Asked.is_answered_by, asked, begun.texts)):
        others.append("other prompts or temperatures")
    if others:
        raise ConfigError(
            f"{path}: was interrupted, and begun with {', '.join(others)}; give the same options to go on, or delete it to "
            "record anew"
        )
    return begun.texts


def named_after(kind: str, temperature: float) -> str:
    """The kind of texts that are sampled at a temperature from prompts of a kind; of greedy ones the prompts' own."""
    return f"{kind}, temperature {temperature:g}" if temperature else kind


def _recorded(output: RequestOutput, kind: str, temperature: float) -> RecordedText:
    answer = output.outputs[0]
    assert answer.logprobs is not None, "they were asked for"
    best = [_likeliest(found) for found in answer.logprobs]
    return RecordedText(
        kind=kind,
        temperature=temperature,
        prompt_ids=output.prompt_token_ids,
        answer_ids=answer.token_ids,
        candidate_ids=np.array([[token_id for token_id, _ in row] for row in best], dtype=np.int32),
        candidate_logprobs=np.array([[value for _, value in row] for row in best], dtype=np.float32),
    )


def _likeliest(found: TokenLogprobs) -> list[tuple[int, float]]:
    """The candidates of one place; the token that was sampled is among `found` even if it is none of them."""
    falling = sorted(found.items(), key=lambda item: (-item[1].logprob, item[0]))
    return [(token_id, one.logprob) for token_id, one in falling[:NUM_CANDIDATES]]


def write_recording(recording: Recording, path: Path) -> None:
    """Write a file, whole or not at all."""
    with whole_file(path) as part, _open(part, "wt") as file:
        for line in ({"recording": VERSION, **asdict(recording.info)}, *(text.to_json() for text in recording.texts)):
            file.write(json.dumps(line) + "\n")


def read_recording(path: Path) -> Recording:
    """Read a file.

    Raises:
        ConfigError: it cannot be read, or is no recording; the error names the line.
    """
    number = 0
    try:
        with _open(path, "rt") as file:
            lines = enumerate(file, 1)
            number, line = next(lines, (1, "{}"))
            first = json.loads(line)
            if not isinstance(first, dict) or not is_version(first.get("recording"), VERSION):
                raise ValueError(f'must begin with an object that has "recording": {VERSION}')
            known = {"load_format": "auto", **first}  # older files do not say
            info = RecordingInfo(**{name: known[name] for name in RecordingInfo.__dataclass_fields__})
            if not is_integer(info.vocab_size) or info.vocab_size < 1:
                raise ValueError(f'"vocab_size": got {info.vocab_size!r:.40}; must be a number of tokens')
            texts = []
            for number, line in lines:  # noqa: B007 - errors name the line
                texts.append(RecordedText.from_json(json.loads(line), vocab_size=info.vocab_size))
            if not texts:
                raise ValueError("has no text")
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise ConfigError(f"cannot read {path} ({error}); give a file that forerun bench replay has recorded") from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        why = f"is not JSON ({error})" if isinstance(error, json.JSONDecodeError) else str(error)
        why = f"lacks {error}" if isinstance(error, KeyError) else why
        raise ConfigError(f"{path}, line {number}: {why}; give a file that forerun bench replay has recorded") from None
    return Recording(info=info, texts=texts)


def _open(path: Path, mode: Literal["rt", "wt"]) -> TextIO:
    """Open a text file, packed if it ends in .gz."""
    if path.suffix == ".gz":
        return cast("TextIO", gzip.open(path, mode, encoding="utf-8"))
    return cast("TextIO", path.open(mode, encoding="utf-8"))
