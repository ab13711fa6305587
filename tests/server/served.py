"""Servers over tiny models, in threads of the test process."""

from __future__ import annotations

import functools
import http.client
import json
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field

from openai import OpenAI

from forerun import SamplingParams
from forerun.server.options import ServerOptions
from forerun.server.serve import Server
from tests.contract.drafters import oracle
from tests.engines import native_target, tiny_llm

NAME = "tiny"
PROMPT = "hello hello"
CHAT = [{"role": "user", "content": "hello"}]


@dataclass
class Served:
    """A running server and what is behind it."""

    server: Server
    lines: list[str] = field(default_factory=list)

    @property
    def model(self):
        return self.server.app.state.model

    @property
    def llm(self):
        return self.model.llm

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server.port}"

    def client(self, **settings):
        return OpenAI(**({"base_url": f"{self.url}/v1", "api_key": "none", "max_retries": 0} | settings))

    def connection(self):
        return http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=30)

    def send(self, method, path, body=None, headers=None):
        """(status, headers, JSON or text) of one request; `body` may be an object, text or bytes."""
        connection = self.connection()
        try:
            data = body if body is None or isinstance(body, (str, bytes)) else json.dumps(body)
            connection.request(method, path, data, {"Content-Type": "application/json"} | (headers or {}))
            response = connection.getresponse()
            text = response.read().decode()
            is_json = text and "json" in (response.getheader("content-type") or "")
            return response.status, response.headers, json.loads(text) if is_json else text
        finally:
            connection.close()

    def post(self, path, body):
        """The JSON of a request that must succeed."""
        status, _, answer = self.send("POST", path, body)
        assert status == 200, answer
        return answer

    def stream(self, path, body):
        """The events of a stream, as they stand on the wire: JSON objects, and "[DONE]" at the end."""
        return self.events(self._streamed(path, body))

    def named_events(self, path, body):
        """The JSON objects of a stream whose events are named by their types."""
        *events, rest = self._streamed(path, body).split("\n\n")
        assert rest == ""
        found = []
        for event in events:
            name, data = event.split("\n")
            found.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {found[-1]['type']}"
        return found

    def _streamed(self, path, body):
        status, headers, text = self.send("POST", path, {**body, "stream": True})
        assert status == 200, text
        assert headers["content-type"].startswith("text/event-stream")
        return text

    @staticmethod
    def events(text):
        """The JSON objects of a stream's text."""
        *events, rest = text.split("\n\n")
        assert rest == ""
        assert all(event.startswith("data: ") for event in events)
        assert events[-1] == "data: [DONE]"
        return [json.loads(event.removeprefix("data: ")) for event in events[:-1]]


@contextmanager
def served(llm, **options):
    """A server over an LLM, ready, on a free port."""
    it = Served(None)
    it.server = Server(
        lambda: llm, ServerOptions(**({"port": 0, "served_model_name": NAME} | options)), report=it.lines.append
    )
    thread = threading.Thread(target=it.server.run)
    thread.start()
    try:
        assert it.server.is_ready.wait(30)
        yield it
    finally:
        it.server.stop()
        thread.join(30)
    assert not thread.is_alive()
    parts = llm.engine.parts
    assert not [*parts.scheduler.waiting, *parts.scheduler.running]
    assert parts.pool.num_free == parts.pool.num_blocks
    assert not llm.executor._states, "what was accepted is submitted or withdrawn"
    assert not llm.engine._accepted


def chat_llm(speculative_config=None, **settings):
    """A tiny model that writes text, in bf16 on the native kernels."""
    return tiny_llm(speculative_config, target=native_target(), **({"max_model_len": 256} | settings))


@functools.cache
def offline():
    """The same model without a server, to compare with."""
    return chat_llm()


def generate(prompt, **sampling):
    """What the offline engine writes: a RequestOutput."""
    params = SamplingParams(**({"temperature": 0, "max_tokens": 16} | sampling))
    (output,) = offline().generate(prompt, params, use_tqdm=False)
    return output


def knows_all(*prompts, max_tokens=32):
    """A config whose drafter drafts what the target alone will write, now and then something else."""
    answers = {}
    for prompt in prompts:
        output = generate(prompt, max_tokens=max_tokens, ignore_eos=True)
        answers[tuple(output.prompt_token_ids)] = output.outputs[0].token_ids
    return {"method": oracle(answers, wrong_every=5), "num_speculative_tokens": 4}


def chat_ids(messages):
    return offline().get_tokenizer().apply_chat_template(messages)
