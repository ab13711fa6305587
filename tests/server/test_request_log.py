"""The request log: a line for each completion that ended, without text, from which a simulation has the same load."""

from __future__ import annotations

import json
import threading
import time

import pytest

from forerun.cli import serve as command
from forerun.core.outputs import CompletionOutput, RequestMetrics, RequestOutput
from forerun.errors import ConfigError
from forerun.plan.simulation.traces import read_trace
from forerun.server.options import ServerOptions
from forerun.server.request_log import RequestLog
from tests.server.served import chat_ids, chat_llm, served

PROMPT = "hello world " * 8
BODY = {"prompt": PROMPT, "temperature": 0, "max_tokens": 6, "ignore_eos": True}


def lines(path):
    """The head and the other lines of a log."""
    head, *others = [json.loads(line) for line in path.read_text().splitlines()]
    return head, others


def ended(request_id, prompt_ids, *, num_tokens=(3,), arrival=0.0, finish_reason="length"):
    outputs = [
        CompletionOutput(index=index, text="secret", token_ids=[1] * count, finish_reason=finish_reason)
        for index, count in enumerate(num_tokens)
    ]
    return RequestOutput(
        request_id=request_id,
        prompt="secret",
        prompt_token_ids=prompt_ids,
        outputs=outputs,
        finished=True,
        metrics=RequestMetrics(arrival_time=arrival),
    )


def written(path, *outputs, salts=None, block_size=4):
    """The lines of requests that end in this order."""
    log = RequestLog(path, model="tiny", block_size=block_size)
    for output in outputs:
        log.note(output.request_id, (salts or {}).get(output.request_id))
    log.add(outputs)
    log.close()
    return lines(path)


def test_served_requests_are_a_trace_of_themselves(tmp_path):
    """Arrivals, lengths, and the beginnings that prompts share."""
    path = tmp_path / "requests.jsonl"
    before = time.time()
    with served(chat_llm(), request_log=path) as server:
        num_prompt = server.post("/v1/completions", BODY)["usage"]["prompt_tokens"]
        server.post("/v1/completions", BODY | {"prompt": PROMPT + "again", "n": 2, "max_tokens": 9})
        server.post("/v1/completions", BODY | {"cache_salt": "mine"})
        server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3})
        assert server.send("POST", "/v1/completions", BODY | {"max_tokens": -1})[0] == 400
        block_size = server.llm.engine.parts.block_size
    text = path.read_text()
    head, found = lines(path)
    assert (head["request_log"], head["model"], head["block_size"]) == (1, "tiny", block_size)
    assert [one["input_length"] for one in found] == [
        num_prompt,
        *[found[1]["input_length"]] * 2,
        num_prompt,
        found[-1]["input_length"],
    ]
    assert found[-1]["input_length"] == len(chat_ids([{"role": "user", "content": "hi"}]))
    assert [one["output_length"] for one in found[:4]] == [6, 9, 9, 6]
    assert all(before <= one["timestamp"] / 1e3 <= time.time() for one in found)
    assert "hello" not in text
    assert "mine" not in text
    first, second, other, salted, _ = (one["hash_ids"] for one in found)
    assert len(first) == num_prompt // block_size
    assert first == second[: len(first)] == other[: len(first)], "prompts that begin alike"
    assert not {*first} & {*salted}, "another salt shares nothing"
    requests = read_trace(path)
    assert [(one.num_prompt_tokens, one.num_output_tokens) for one in requests[:2]] == [
        (num_prompt, 6),
        (found[1]["input_length"], 9),
    ]
    prompts = [one.prompt_tokens(number, vocab_size=100, seed=0) for number, one in enumerate(requests[:2])]
    shared = len(first) * block_size
    assert prompts[0][:shared] == prompts[1][:shared]


def test_a_client_that_goes_away_leaves_what_it_got(tmp_path):
    path = tmp_path / "requests.jsonl"
    with served(chat_llm(), request_log=path) as server:
        connection = server.connection()
        body = json.dumps(BODY | {"stream": True, "max_tokens": 150})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        connection.getresponse().readline()
        connection.sock.close()
        connection.close()
    (_, (line,)) = lines(path)
    assert 0 < line["output_length"] <= 150
    assert line["finish_reason"] in ("abort", "length")


def test_without_the_option_nothing_is_logged(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with served(chat_llm()) as server:
        server.post("/v1/completions", BODY)
        assert server.model.request_log is None
    assert not list(tmp_path.iterdir())


def test_a_log_goes_on_behind_an_earlier_one_and_is_read_by_arrival(tmp_path):
    path = tmp_path / "log.jsonl"
    written(path, ended("0", [1] * 9, arrival=5.0), ended("1", [1] * 9, arrival=2.0))
    written(path, ended("0", [1] * 9, arrival=9.0), block_size=2)
    requests = read_trace(path)
    assert [one.arrival for one in requests] == pytest.approx([0.0, 3.0, 7.0], abs=0.5)
    first, second, third = requests
    assert first.piece_hashes == second.piece_hashes
    assert (first.piece_size, len(first.piece_hashes)) == (4, 2)
    assert (third.piece_size, len(third.piece_hashes)) == (2, 4)
    assert not {*first.piece_hashes} & {*third.piece_hashes}, "another life has another key"


def test_names_of_blocks_are_of_all_tokens_before_them_and_of_the_salt(tmp_path):
    outputs = [ended("0", [1] * 8), ended("1", [1] * 4 + [2] * 4), ended("2", [2] * 4 + [1] * 4), ended("3", [1] * 8)]
    _, found = written(tmp_path / "log.jsonl", *outputs, salts={"3": "s"})
    one, two, three, four = (line["hash_ids"] for line in found)
    assert one[0] == two[0]
    assert len({*one, *two, *three, *four}) == 7
    assert all(0 <= name < 2**53 for name in (*one, *two, *three, *four))


def test_requests_without_an_answer_are_left_out_of_the_simulation_and_that_is_said(tmp_path, caplog):
    path = tmp_path / "log.jsonl"
    written(path, ended("0", [1] * 5), ended("1", [1] * 5, num_tokens=(0,), finish_reason="abort"))
    assert len(read_trace(path)) == 1
    assert "1 requests that ended before their first token are left out" in caplog.text


def test_whoever_hands_requests_over_does_not_wait_for_the_file(tmp_path, monkeypatch):
    stuck = threading.Event()
    monkeypatch.setattr(RequestLog, "_lines", lambda self, ended: stuck.wait(30) and [])
    log = RequestLog(tmp_path / "log.jsonl", model="tiny", block_size=4)
    begin = time.monotonic()
    log.add([ended("0", [1] * 9) for _ in range(100)])
    assert time.monotonic() - begin < 10
    stuck.set()
    log.close()


def test_a_log_that_cannot_be_written_any_more_ends_and_the_server_goes_on(tmp_path, caplog):
    path = tmp_path / "log.jsonl"
    log = RequestLog(path, model="tiny", block_size=4)
    log._file.close()
    log.add([ended("0", [1] * 9)])
    log.add([ended("1", [1] * 9)])
    log.close()
    assert "the request log ends here; the server goes on" in caplog.text


def on_a_full_disk(path, monkeypatch):
    """A log of five requests whose file has no room for the last."""
    log = RequestLog(path, model="tiny", block_size=4)
    write, room = log._write, iter(range(4))

    def cut(record):
        if next(room, None) is None:
            log._file.write(json.dumps(record)[:40])
            log._file.flush()
            raise OSError(28, "No space left on device")
        write(record)

    monkeypatch.setattr(log, "_write", cut)
    log.add([ended(str(number), [1] * 9) for number in range(5)])
    log.close()


def test_what_a_full_disk_has_of_a_line_is_cut_off_and_the_log_goes_on_later(tmp_path, monkeypatch):
    path = tmp_path / "log.jsonl"
    on_a_full_disk(path, monkeypatch)
    assert len(read_trace(path)) == 4
    assert path.read_text().endswith("}\n")
    written(path, ended("0", [1] * 9))
    assert len(read_trace(path)) == 5


def test_a_log_whose_last_flush_fails_is_closed_all_the_same(tmp_path, caplog):
    log = RequestLog(tmp_path / "log.jsonl", model="tiny", block_size=4)

    class Full:
        def close(self):
            raise OSError(28, "No space left on device")

    log._file.close()
    log._file = Full()
    closing = threading.Thread(target=log.close, daemon=True)
    closing.start()
    closing.join(10)
    assert not closing.is_alive()
    assert "the request log ends here" in caplog.text


@pytest.mark.parametrize(("last", "num_requests"), [(slice(-20), 2), (slice(-1), 3), (slice(5), 2)])
def test_a_log_goes_on_behind_a_line_that_a_kill_left_unfinished(tmp_path, last, num_requests):
    path = tmp_path / "log.jsonl"
    written(path, ended("0", [1] * 9), ended("1", [1] * 9))
    *whole, line = path.read_text().splitlines(keepends=True)
    path.write_text("".join(whole) + line[last])
    written(path, ended("2", [1] * 9))
    assert len(read_trace(path)) == num_requests


@pytest.mark.parametrize("name", ["log.txt", "no/such/folder/log.jsonl", "folder.jsonl"])
def test_a_file_that_cannot_be_a_log_is_refused(name, tmp_path):
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(ConfigError, match=r"request_log: .*(must end in \.jsonl|in a folder that exists)"):
        ServerOptions(request_log=tmp_path / name)


def test_replicas_have_no_log(tmp_path):
    options = ServerOptions(request_log=tmp_path / "log.jsonl")
    with pytest.raises(ConfigError, match="each replica would name blocks by itself"):
        command.replica_spec("tiny", options, command.ENGINE)
