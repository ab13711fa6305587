"""Reads traces of requests: mooncake's JSON lines and our own request log, Azure's CSV, and the results of a load test."""

from __future__ import annotations

import csv
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import Any

from forerun.core.file_version import is_version
from forerun.core.finite_numbers import is_number
from forerun.core.integers import is_integer
from forerun.errors import ConfigError, did_you_mean
from forerun.plan.load_test_file import read_load_test_file
from forerun.plan.simulation.requests import SimulatedRequest

MOONCAKE_PIECE = 512  # tokens that a hash id of mooncake's traces names
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
LOAD_TEST_KEYS = ("start_times", "input_lens", "output_lens")
LOG_KEY, LOG_VERSION = "request_log", 1
"""What the first line of a request log has, and the version of the format."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Line:
    """A line of a trace, for messages."""

    path: Path
    number: int

    def error(self, problem: str) -> ConfigError:
        return ConfigError(f"{self.path}, line {self.number}: {problem}")

    def tokens(self, name: str, value: object) -> int:
        """A number of tokens, 1 or more."""
        if isinstance(value, str) and re.fullmatch(r"-?\d{1,18}", value.strip()):
            value = int(value)
        if not is_integer(value) or value < 1:
            raise self.error(
                f"got {name}={value!r:.60}; must be an integer of 1 or more; mend the line, or leave it out"
            )
        return value

    def number_of(self, name: str, value: object) -> float:
        if not is_number(value):
            raise self.error(f"got {name}={value!r:.60}; must be a number")
        return float(value)


def read_trace(path: Path, *, piece_size: int = MOONCAKE_PIECE) -> list[SimulatedRequest]:
    """Read a trace by its ending; the first request arrives at 0.

    .jsonl is mooncake's, or the log of `forerun serve --request-log`, which its first line tells; .csv is Azure's, .json a
    load test's.

    Args:
        path: the file.
        piece_size: tokens that each of mooncake's hash ids names; a request log says that itself.

    Raises:
        ConfigError: the file cannot be read or is none of these; the message names the first bad line.
    """
    if path.suffix not in READERS:
        raise ConfigError(f"{path}: got a name that ends in {path.suffix!r}{did_you_mean(path.suffix, READERS)}")
    try:
        requests = READERS[path.suffix](path, piece_size)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or 'unreadable'}; give a trace") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a text in UTF-8 ({error.reason}); give a trace") from None
    except csv.Error as error:
        raise ConfigError(f"{path}: not CSV ({error}); give a trace") from None
    if not requests:
        raise ConfigError(f"{path}: has no requests; give a trace with at least one")
    return requests


def _read_json_lines(path: Path, piece_size: int) -> list[SimulatedRequest]:
    """Mooncake's lines, or those of a request log, whose first one says so."""
    with path.open(encoding="utf-8") as file:
        lines = _json_lines(path, file)
        first = next(lines, None)
        if first is None:
            return []
        if LOG_KEY not in first[1]:
            return _read_mooncake(chain([first], lines), piece_size)
        if piece_size != MOONCAKE_PIECE:
            raise ConfigError(
                f"piece_size: {path} is a request log, which says itself how long blocks are; leave it out"
            )
        return _read_request_log(path, chain([first], lines))


def _read_mooncake(lines: Iterable[tuple[_Line, Mapping[str, Any]]], piece_size: int) -> list[SimulatedRequest]:
    """JSON lines with "timestamp" (ms), "input_length", "output_length" and optionally "hash_ids"."""
    times: list[float] = []
    found: list[SimulatedRequest] = []
    for line, record in lines:
        _check_keys(line, record)
        _add_time(times, line.number_of("timestamp", record["timestamp"]) / 1e3, line)
        num_prompt = line.tokens("input_length", record["input_length"])
        one = SimulatedRequest(
            arrival=times[-1] - times[0],
            num_prompt_tokens=num_prompt,
            num_output_tokens=line.tokens("output_length", record["output_length"]),
            piece_hashes=_hash_ids(line, record, -(-num_prompt // piece_size), num_prompt, piece_size),
            piece_size=piece_size,
        )
        found.append(one)
    return found


def _read_request_log(path: Path, lines: Iterable[tuple[_Line, Mapping[str, Any]]]) -> list[SimulatedRequest]:
    """The log of `forerun serve`: a head for each life of a server, then a line for each completion, as they ended.

    `hash_ids` name the full blocks of a prompt; the rest of it is its own.
    """
    found: list[SimulatedRequest] = []
    block_size = num_without_answer = 0
    for line, record in lines:
        if LOG_KEY in record:
            if not is_version(record[LOG_KEY], LOG_VERSION):
                raise line.error(f"got {LOG_KEY}={record[LOG_KEY]!r:.60}; this forerun reads {LOG_VERSION}: log anew")
            block_size = line.tokens("block_size", record.get("block_size"))
            continue
        _check_keys(line, record)
        time = _checked(line.number_of("timestamp", record["timestamp"]) / 1e3, line)
        num_prompt = line.tokens("input_length", record["input_length"])
        if record["output_length"] == 0:
            num_without_answer += 1
            continue
        one = SimulatedRequest(
            arrival=time,
            num_prompt_tokens=num_prompt,
            num_output_tokens=line.tokens("output_length", record["output_length"]),
            piece_hashes=_hash_ids(line, record, num_prompt // block_size, num_prompt, block_size),
            piece_size=block_size,
        )
        found.append(one)
    if num_without_answer:
        logger.warning("%s: %d requests that ended before their first token are left out", path, num_without_answer)
    found.sort(key=lambda one: one.arrival)
    return [replace(one, arrival=one.arrival - found[0].arrival) for one in found]


def _check_keys(line: _Line, record: Mapping[str, Any]) -> None:
    for key in ("timestamp", "input_length", "output_length"):
        if key not in record:
            raise line.error(f'has no "{key}"; each line needs timestamp (ms), input_length, output_length')


def _hash_ids(line: _Line, record: Mapping[str, Any], wanted: int, num_prompt: int, piece_size: int) -> tuple[int, ...]:
    found = record.get("hash_ids", [])
    if not isinstance(found, list) or not all(type(one) is int and one >= 0 for one in found):
        raise line.error(f"got hash_ids={found!r:.60}; must be a list of integers of 0 or more")
    if found and len(found) != wanted:
        raise line.error(
            f"got {len(found)} hash_ids for {num_prompt} tokens; must be {wanted}, one for each {piece_size} tokens"
        )
    return tuple(found)


def _json_lines(path: Path, lines: Iterable[str]) -> Iterator[tuple[_Line, Mapping[str, Any]]]:
    """The objects of all lines; a request log may end in an unfinished one, as its server writes on or has been killed."""
    is_log = False
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        line = _Line(path, number)
        try:
            record = json.loads(text)
        except (ValueError, RecursionError) as error:
            if is_log and not text.endswith("\n"):
                logger.warning("%s: line %d is unfinished, and is left out", path, number)
                return
            raise line.error(f"not JSON ({error}); write one object per line") from None
        if not isinstance(record, dict):
            raise line.error(f"got a {type(record).__name__}; must be an object")
        is_log = is_log or LOG_KEY in record
        yield line, record


def _checked(time: float, line: _Line) -> float:
    if time < 0:
        raise line.error(f"got a time of {time:g} s; must be 0 or more")
    return time


def _add_time(times: list[float], time: float, line: _Line) -> None:
    _checked(time, line)
    if times and time < times[-1]:
        raise line.error(
            f"arrives at {time:g} s, before the line ahead of it ({times[-1]:g} s); sort the trace by time"
        )
    times.append(time)


def _read_azure(path: Path, _: int) -> list[SimulatedRequest]:
    """CSV with a header: TIMESTAMP (date and time), ContextTokens, GeneratedTokens."""
    times: list[float] = []
    lengths: list[tuple[int, int]] = []
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file)
        missing = [name for name in AZURE_COLUMNS if name not in (reader.fieldnames or ())]
        if missing:
            raise _Line(path, 1).error(
                f"has no column {', '.join(missing)}; the first line must name {', '.join(AZURE_COLUMNS)}"
            )
        for row in reader:
            line = _Line(path, reader.line_num)
            _add_time(times, _azure_time(line, row["TIMESTAMP"]), line)
            lengths.append(
                (
                    line.tokens("ContextTokens", row["ContextTokens"]),
                    line.tokens("GeneratedTokens", row["GeneratedTokens"]),
                )
            )
    return _plain_requests(times, lengths)


def _azure_time(line: _Line, text: str | None) -> float:
    """Seconds since 1970 of e.g. "2023-11-16 18:15:46.6805900"; without a time zone it is UTC."""
    whole, fraction, zone = "", "0", ""
    found = re.fullmatch(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d+))?(Z|[+-]\d\d:\d\d)?", (text or "").strip())
    if found is not None:
        whole, fraction, zone = found[1], found[2] or "0", found[3] or "+00:00"
    try:
        return datetime.fromisoformat(whole + zone.replace("Z", "+00:00")).timestamp() + float(f"0.{fraction}")
    except ValueError:
        raise line.error(f"got TIMESTAMP={text!r}; must be a date and time, e.g. 2023-11-16 18:15:46.6805900") from None


def _read_load_test(path: Path, _: int) -> list[SimulatedRequest]:
    """The requests of a load test, each when it was due: its client may have waited before it sent it."""
    saved = read_load_test_file(path, *LOAD_TEST_KEYS, queue_times=0.0)
    times: list[float] = []
    lengths: list[tuple[int, int]] = []
    for number, (start, num_prompt, num_output, wait) in enumerate(saved.requests):
        line = _Request(path, number)
        time = line.number_of("start_times", start) - line.number_of("queue_times", wait)
        _add_time(times, time, line)
        lengths.append((line.tokens("input_lens", num_prompt), line.tokens("output_lens", num_output)))
    return _plain_requests(times, lengths)


class _Request(_Line):
    """A request of a load test, for messages."""

    __slots__ = ()

    def error(self, problem: str) -> ConfigError:
        return ConfigError(f"{self.path}, request {self.number} (from 0): {problem}")


def _plain_requests(times: Sequence[float], lengths: Sequence[tuple[int, int]]) -> list[SimulatedRequest]:
    return [
        SimulatedRequest(arrival=time - times[0], num_prompt_tokens=num_prompt, num_output_tokens=num_output)
        for time, (num_prompt, num_output) in zip(times, lengths, strict=True)
    ]


Reader = Callable[[Path, int], list[SimulatedRequest]]

READERS: dict[str, Reader] = {".jsonl": _read_json_lines, ".csv": _read_azure, ".json": _read_load_test}
"""The reader of each ending."""


def conversation_requests(
    exchanges: Iterable[tuple[str, str]], encode: Callable[[str], list[int]], *, max_model_len: int
) -> list[SimulatedRequest]:
    """Requests of (prompt, answer) texts, such as ShareGPT's, all at time 0: see `with_arrivals`.

    Those that are longer than the model's context are left out, which a warning counts.

    Args:
        exchanges: the texts.
        encode: gives the token ids of a text.
        max_model_len: the model's context.

    Raises:
        ConfigError: none of them fits.
    """
    requests: list[SimulatedRequest] = []
    num_too_long = 0
    for prompt, answer in exchanges:
        ids, num_output = encode(prompt), len(encode(answer))
        if len(ids) + num_output > max_model_len:
            num_too_long += 1
        elif ids and num_output:
            requests.append(
                SimulatedRequest(arrival=0.0, num_prompt_tokens=len(ids), num_output_tokens=num_output, prompt_ids=ids)
            )
    if not requests:
        raise ConfigError(f"conversations: none has at most {max_model_len} tokens, prompt and answer together")
    if num_too_long:
        logger.warning(
            "conversations: %d of %d are longer than max_model_len (%d), and are left out",
            num_too_long,
            num_too_long + len(requests),
            max_model_len,
        )
    return requests
