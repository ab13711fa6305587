"""Writes the tables of a run in Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.peers.engines import CONTENDERS, FORERUN, PEERS, Contender, plain_contender
from benchmarks.peers.schedule import SPECULATED_KINDS
from benchmarks.peers.summary import (
    Summary,
    decode_speed,
    milliseconds,
    pass_milliseconds,
    pass_ratio,
    whole_speed,
)

NONE = "–"


def to_markdown(run: dict[str, Any]) -> str:
    """The report of a run: figures, machine, versions, settings and command."""
    summary = Summary(run["measurements"])
    bandwidth = [one["bytes_per_second"] / 1e9 for one in run["measurements"]]
    taking_part = [one for one in CONTENDERS if one.name in run["versions"]]
    sections = [
        f"{run['model']}, {run['num_threads']} threads, {run['rounds']} rounds. {run['machine']}. Memory read at "
        f"{min(bandwidth):.0f} to {max(bandwidth):.0f} GB/s, median {statistics.median(bandwidth):.0f}.",
        "## Plain decoding",
        _plain_table(summary, taking_part, run["memory"]),
        "## forerun against each",
        _versus_table(summary, taking_part, run["memory"]),
        *(_speculation_section(summary, taking_part, kind) for kind in SPECULATED_KINDS),
        "## Versions and settings",
        _settings_table(taking_part, run["versions"]),
        f"```bash\n{run['command']}\n```",
    ]
    return "\n\n".join(sections) + "\n"


def _plain_table(summary: Summary, contenders: Sequence[Contender], memory: dict[str, int]) -> str:
    """Speeds in tokens/s, times in ms, memory in MB."""
    header = (
        *("engine", "1 sequence, decode", "with prompt", "8 sequences, decode", "with prompt"),
        *("prefill of 512, ms", "T(1), ms", "T(8), ms", "T(16), ms", "T(8) / T(1)", "peak memory, MB"),
    )
    rows = [
        [
            PEERS[one.peer].title,
            _number(summary.median(one.name, "plain", decode_speed), 1),
            _number(summary.median(one.name, "plain", whole_speed), 1),
            _number(summary.median(one.name, "batch", decode_speed), 1),
            _number(summary.median(one.name, "batch", whole_speed), 1),
            _number(summary.median(one.name, "prefill", milliseconds), 0),
            *(_number(summary.median(one.name, "curve", pass_milliseconds(rows)), 1) for rows in (1, 8, 16)),
            _number(summary.median(one.name, "curve", pass_ratio(8)), 2),
            _number(memory[one.name] / 1e6, 0),
        ]
        for one in contenders
        if one.speculation is None
    ]
    return _table(header, rows)


def _versus_table(summary: Summary, contenders: Sequence[Contender], memory: dict[str, int]) -> str:
    """Speed-ups of forerun over each peer, both with plain decoding, and the ratio of their memory."""
    own = plain_contender(FORERUN.name).name
    header = (
        "peer",
        "1 sequence",
        "8 sequences",
        "prefill of 512",
        "T(1)",
        "T(8)",
        "T(16)",
        "memory, share of the peer's",
    )
    rows = [
        [
            PEERS[one.peer].title,
            _times(summary.ratio(own, one.name, "plain", decode_speed)),
            _times(summary.ratio(own, one.name, "batch", decode_speed)),
            _times(summary.ratio(one.name, own, "prefill", milliseconds)),
            *(_times(summary.ratio(one.name, own, "curve", pass_milliseconds(rows))) for rows in (1, 8, 16)),
            _number(memory[own] / memory[one.name], 2),
        ]
        for one in contenders
        if one.speculation is None and one.name != own
    ]
    return _table(header, rows)


def _speculation_section(summary: Summary, contenders: Sequence[Contender], kind: str) -> str:
    """Speculation on one kind of prompt: each engine against its own plain decoding, and forerun against the best peer."""
    header = (
        *("engine", "plain, tokens/s", "speculated, tokens/s", "with prompt", "× own plain", "with prompt"),
        *("tokens per pass", "texts differing from plain"),
    )
    rows = []
    for one in contenders:
        if one.speculation is None:
            continue
        plain = plain_contender(one.peer).name
        texts = summary.texts(one.name, plain, kind)
        rows.append(
            [
                one.name,
                _number(summary.median(plain, kind, decode_speed), 1),
                _number(summary.median(one.name, kind, decode_speed), 1),
                _number(summary.median(one.name, kind, whole_speed), 1),
                _times(summary.ratio(one.name, plain, kind, decode_speed)),
                _times(summary.ratio(one.name, plain, kind, whole_speed)),
                _number(summary.acceptance_length(one.name, kind), 2),
                f"{texts.differing} of {texts.prompts}",
            ]
        )
    title = {"code": "Code edits", "chat": "Chat"}[kind]
    return f"## {title}, speculated\n\n{_table(header, rows)}\n\n{_best_line(summary, contenders, kind)}"


def _best_line(summary: Summary, contenders: Sequence[Contender], kind: str) -> str:
    """Compare forerun's fastest drafter with the peers' fastest speculation."""
    speeds = {
        one: summary.median(one.name, kind, decode_speed) or 0.0 for one in contenders if one.speculation is not None
    }
    own = max((one for one in speeds if one.peer == FORERUN.name), key=lambda one: speeds[one])
    peers = [one for one in speeds if one.peer != FORERUN.name]
    if not peers:
        return f"{own.name} is the faster of forerun's drafters here."
    best = max(peers, key=lambda one: speeds[one])
    decode, whole = (summary.ratio(own.name, best.name, kind, speed) for speed in (decode_speed, whole_speed))
    return f"{own.name} against {best.name}, the fastest of the peers' here: {_times(decode)}, with prompt {_times(whole)}."


def _settings_table(contenders: Sequence[Contender], versions: dict[str, str]) -> str:
    rows = [
        [
            one.name,
            versions[one.name],
            PEERS[one.peer].note,
            ", ".join(f"{name} {value}" for name, value in (one.speculation or {}).items()) or "plain",
        ]
        for one in contenders
    ]
    return _table(("contender", "versions", "weights and KV", "speculation"), rows)


def _number(value: float | None, digits: int) -> str:
    return NONE if value is None else f"{value:.{digits}f}"


def _times(value: float | None) -> str:
    return NONE if value is None else f"{value:.2f} ×"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
