"""Traces are read in the formats they are published in, and the first bad line is named."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.errors import ConfigError
from forerun.plan.simulation.traces import conversation_requests, read_trace

MOONCAKE = [
    {"timestamp": 1000, "input_length": 1300, "output_length": 7, "hash_ids": [4, 5, 6]},
    {"timestamp": 1250, "input_length": 600, "output_length": 1, "hash_ids": [4, 9]},
    {"timestamp": 1250, "input_length": 3, "output_length": 2},
]
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
"""
LOAD_TEST = {
    "start_times": [100.0, 101.0, 101.5],
    "queue_times": [0.0, 0.25, 0.0],
    "input_lens": [5, 6, 7],
    "output_lens": [1, 2, 3],
    "errors": ["", "", ""],
}


def mooncake(path, records):
    file = path / "trace.jsonl"
    file.write_text("\n".join(one if isinstance(one, str) else json.dumps(one) for one in records) + "\n")
    return file


def changed(records, number, **values):
    return [one | values if i == number else one for i, one in enumerate(records)]


def lengths(requests):
    return [(one.num_prompt_tokens, one.num_output_tokens) for one in requests]


def test_mooncakes_times_lengths_and_hashes(tmp_path):
    requests = read_trace(mooncake(tmp_path, MOONCAKE))
    assert [one.arrival for one in requests] == [0.0, 0.25, 0.25]
    assert lengths(requests) == [(1300, 7), (600, 1), (3, 2)]
    first, second, third = (one.prompt_tokens(i, vocab_size=1000, seed=0) for i, one in enumerate(requests))
    assert (len(first), len(second), len(third)) == (1300, 600, 3)
    assert first[:512] == second[:512], "the same hash names the same tokens"
    assert first[512:600] != second[512:600]


LOG = [
    {"request_log": 1, "block_size": 16},
    {"timestamp": 5000.5, "input_length": 40, "output_length": 3, "hash_ids": [7, 8]},
    {"timestamp": 4000.5, "input_length": 15, "output_length": 2, "hash_ids": []},
]


def test_a_request_logs_lines_are_in_the_order_of_their_end_and_name_full_blocks(tmp_path):
    requests = read_trace(mooncake(tmp_path, LOG))
    assert [one.arrival for one in requests] == [0.0, 1.0]
    assert lengths(requests) == [(15, 2), (40, 3)]
    assert requests[1].piece_hashes == (7, 8)
    assert len(requests[1].prompt_tokens(1, vocab_size=100, seed=0)) == 40


@pytest.mark.parametrize(
    ("records", "problem"),
    [
        (changed(LOG, 0, request_log=2), "line 1: got request_log=2; this forerun reads 1"),
        (changed(LOG, 0, request_log=True), "line 1: got request_log=True; this forerun reads 1"),
        (changed(LOG, 0, block_size=0), "line 1: got block_size=0"),
        (changed(LOG, 1, hash_ids=[7, 8, 9]), "line 2: got 3 hash_ids for 40 tokens; must be 2"),
        (changed(LOG, 1, timestamp=-5), "line 2: got a time of -0.005 s"),
        (changed(LOG, 1, output_length=-1), "line 2: got output_length=-1"),
        ([*LOG, {"timestamp": 1}], 'line 4: has no "input_length"'),
        (LOG[:1], "has no requests"),
    ],
)
def test_the_first_bad_line_of_a_request_log_is_named(tmp_path, records, problem):
    with pytest.raises(ConfigError, match=problem):
        read_trace(mooncake(tmp_path, records))


@pytest.mark.parametrize("length", [1, 30])
def test_a_request_logs_last_line_may_be_unfinished_which_is_said(tmp_path, caplog, length):
    file = mooncake(tmp_path, LOG)
    file.write_text(file.read_text() + json.dumps(LOG[1])[:length])
    assert lengths(read_trace(file)) == [(15, 2), (40, 3)]
    assert f"{file}: line 4 is unfinished, and is left out" in caplog.text


@pytest.mark.parametrize("records", [[*LOG, "{"], [*LOG[:2], "{", LOG[2]]])
def test_a_line_of_a_request_log_that_ends_and_is_not_json_is_named(tmp_path, records):
    with pytest.raises(ConfigError, match=f"line {records.index('{') + 1}: not JSON"):
        read_trace(mooncake(tmp_path, records))


def test_a_request_log_says_how_long_its_blocks_are(tmp_path):
    with pytest.raises(ConfigError, match="piece_size"):
        read_trace(mooncake(tmp_path, LOG), piece_size=32)


def test_azures_times_may_have_any_precision_and_a_time_zone(tmp_path):
    file = tmp_path / "trace.csv"
    file.write_text(AZURE + "2023-11-16 18:15:51+00:00,5,6\n")
    requests = read_trace(file)
    assert [one.arrival for one in requests] == pytest.approx([0.0, 4.314579, 4.31941])
    assert lengths(requests) == [(374, 44), (396, 109), (5, 6)]


def test_a_load_tests_requests_arrive_when_they_were_due(tmp_path):
    file = tmp_path / "result.json"
    file.write_text(json.dumps(LOAD_TEST))
    requests = read_trace(file)
    assert [one.arrival for one in requests] == [0.0, 0.75, 1.5]
    assert lengths(requests) == [(5, 1), (6, 2), (7, 3)]


@pytest.mark.parametrize(
    ("records", "problem"),
    [
        (["{", *MOONCAKE], "line 1: not JSON"),
        ([MOONCAKE[0], "[1]"], "line 2: got a list"),
        ([MOONCAKE[0], {"timestamp": 5, "input_length": 3}], 'line 2: has no "output_length"'),
        (changed(MOONCAKE, 1, timestamp=999), "line 2: arrives at 0.999 s, before the line ahead of it"),
        (changed(MOONCAKE, 0, timestamp=-1), "line 1: got a time of -0.001 s"),
        (changed(MOONCAKE, 2, timestamp="late"), "line 3: got timestamp='late'"),
        (changed(MOONCAKE, 2, timestamp=float("nan")), "line 3: got timestamp=nan"),
        (changed(MOONCAKE, 2, timestamp=10**400), "line 3: got timestamp=1000"),
        (["[" * 100_000, *MOONCAKE], "line 1: not JSON"),
        (changed(MOONCAKE, 2, input_length=-3), "line 3: got input_length=-3"),
        (changed(MOONCAKE, 2, output_length=0), "line 3: got output_length=0"),
        (changed(MOONCAKE, 2, output_length=1.5), "line 3: got output_length=1.5"),
        (changed(MOONCAKE, 1, hash_ids=[1]), "line 2: got 1 hash_ids for 600 tokens; must be 2"),
        (changed(MOONCAKE, 1, hash_ids="x"), "line 2: got hash_ids='x'"),
        ([], "has no requests"),
    ],
)
def test_the_first_bad_line_of_mooncake_is_named(tmp_path, records, problem):
    with pytest.raises(ConfigError, match=problem):
        read_trace(mooncake(tmp_path, records))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("a,b\n1,2\n", "line 1: has no column TIMESTAMP, ContextTokens, GeneratedTokens"),
        (AZURE + "yesterday,3,4\n", "line 4: got TIMESTAMP='yesterday'"),
        (AZURE + "2023-13-16 18:15:46,3,4\n", "line 4: got TIMESTAMP='2023-13-16 18:15:46'"),
        (AZURE + "2023-11-16 18:15:51,3\n", "line 4: got GeneratedTokens=None"),
        (AZURE + "2023-11-16 18:15:51,-3,4\n", "line 4: got ContextTokens=-3"),
        (AZURE + f"2023-11-16 18:15:51,{'9' * 5000},4\n", "line 4: got ContextTokens='999"),
        (AZURE + "x" * 200_000, r"trace\.csv: not CSV \(field larger than"),
        (AZURE + "2023-11-16 18:15:40,3,4\n", "line 4: arrives at .* before the line ahead"),
    ],
)
def test_the_first_bad_line_of_azure_is_named(tmp_path, content, problem):
    file = tmp_path / "trace.csv"
    file.write_text(content)
    with pytest.raises(ConfigError, match=problem):
        read_trace(file)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("[]", "is a list, as ShareGPT's"),
        ("{", "not JSON"),
        ("{}", "has no start_times"),
        (json.dumps(LOAD_TEST | {"input_lens": [1]}), "3 start_times, 1 input_lens"),
        (json.dumps(LOAD_TEST | {"errors": ["", ""]}), "3 queue_times, 2 errors"),
        (json.dumps(LOAD_TEST | {"errors": 3}), "got errors=3; must be a list"),
        (json.dumps(LOAD_TEST | {"queue_times": 3}), "got queue_times=3; must be a list"),
        (json.dumps(LOAD_TEST | {"start_times": [0, 1, 10**400]}), r"request 2 \(from 0\): got start_times=1000"),
        (
            json.dumps(LOAD_TEST | {"unfinished": 1}),
            "was interrupted with requests under way, whose lengths are not known",
        ),
        (json.dumps(LOAD_TEST | {"errors": ["", "refused", ""]}), r"request 1 \(from 0\): failed \('refused'\)"),
        (json.dumps(LOAD_TEST | {"output_lens": [1, 2, -1]}), r"request 2 \(from 0\): got output_lens=-1"),
        (json.dumps(LOAD_TEST | {"start_times": [3.0, 1.0, 2.0]}), r"request 1 \(from 0\): arrives at 0.75 s, before"),
    ],
)
def test_what_is_wrong_with_a_load_test_is_said(tmp_path, content, problem):
    file = tmp_path / "result.json"
    file.write_text(content)
    with pytest.raises(ConfigError, match=problem):
        read_trace(file)


def test_files_that_are_no_traces_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"ends in '\.txt'"):
        read_trace(tmp_path / "trace.txt")
    with pytest.raises(ConfigError, match="No such file"):
        read_trace(tmp_path / "trace.csv")
    file = tmp_path / "trace.csv"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not a text"):
        read_trace(file)


@given(st.binary(max_size=60), st.sampled_from([".jsonl", ".csv", ".json"]))
def test_whatever_a_file_holds_it_is_read_or_refused(tmp_path_factory, content, ending):
    file = tmp_path_factory.getbasetemp() / f"noise{ending}"
    file.write_bytes(content)
    with pytest.raises(ConfigError):
        read_trace(file)


def test_conversations_longer_than_the_context_are_left_out_and_counted(caplog):
    texts = [("ab", "cde"), ("a" * 50, "b" * 60), ("", "x")]
    (request,) = conversation_requests(texts, lambda text: [*text.encode()], max_model_len=100)
    assert "1 of 2 are longer than max_model_len (100), and are left out" in caplog.text
    assert (list(request.prompt_ids), request.num_output_tokens) == ([97, 98], 3)
    with pytest.raises(ConfigError, match="none has at most 4 tokens"):
        conversation_requests(texts, lambda text: [*text.encode()], max_model_len=4)
