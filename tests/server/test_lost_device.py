"""A server whose device computes no more: it says so, ends, and its process has an exit code of its own."""

from __future__ import annotations

import threading

from forerun.cli.app import main
from forerun.errors import DeviceLostError
from forerun.server.options import ServerOptions
from forerun.server.serve import Server
from tests.server.served import NAME, PROMPT, Served, chat_llm

REASON = "device: it computes no more (CUDA error: an illegal memory access was encountered)"


def losing_llm(*, may_end):
    """An LLM whose first step loses the device, once `may_end` is set."""
    llm = chat_llm()

    def lose():
        may_end.wait(10)
        raise DeviceLostError(REASON)

    llm.engine.step = lose
    return llm


def test_requests_get_503_and_the_server_ends_with_the_reason():
    may_end, raised = threading.Event(), []
    may_end.set()
    it = Served(Server(lambda: losing_llm(may_end=may_end), ServerOptions(port=0, served_model_name=NAME), report=str))
    health, stop = [], it.server.stop

    def stop_later():
        health.append(it.send("GET", "/health"))
        stop()

    it.server.stop = stop_later

    def run():
        try:
            it.server.run()
        except DeviceLostError as error:
            raised.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    assert it.server.is_ready.wait(30)
    status, _, answer = it.send("POST", "/v1/completions", {"model": NAME, "prompt": PROMPT})
    thread.join(30)
    assert not thread.is_alive()
    assert raised == [REASON]
    assert status == 503
    assert "the device computes no more; the server ends" in answer["error"]["message"]
    ((status, _, answer),) = health
    assert status == 503
    assert answer["error"]["message"] == "the device is lost; the server's log has the reason"


def test_the_process_ends_with_code_3_and_one_line(monkeypatch, capsys):
    class LosingServer:
        def __init__(self, *_args, **_options):
            pass

        def run(self):
            raise DeviceLostError(REASON)

    monkeypatch.setattr("forerun.server.serve.Server", LosingServer)
    assert main(["serve", "m", "--disable-log-stats"]) == 3
    assert capsys.readouterr().err == f"error: {REASON}\n"
