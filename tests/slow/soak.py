"""What a soak asks of a server: questions with known answers, mistakes, and clients that do all of it at once."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field

import aiohttp

from forerun import SamplingParams
from forerun.bench.prompts import WORKLOADS

TIMEOUT = aiohttp.ClientTimeout(total=300)  # seconds
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
GREEDY = {"temperature": 0}
COMPLETIONS = {
    "short": {"max_tokens": 6},
    "long": {"max_tokens": 160, "ignore_eos": True},
    "without drafts": {"max_tokens": 40, "forerun": {"speculation": "off"}},
    "stop": {"max_tokens": 80, "stop": ["\n\n", "the end"]},
    "sampled": {"max_tokens": 40, "temperature": 0.8, "top_p": 0.9, "seed": 11},
    "several": {"max_tokens": 30, "temperature": 0.7, "seed": 5, "n": 3},
    "penalties": {"max_tokens": 40, "presence_penalty": 0.5, "repetition_penalty": 1.2},
}
"""Fields of requests to /v1/completions, by the name of their kind."""

CHATS = {
    "chat": {"max_tokens": 60},
    "json": {
        "max_tokens": 60,
        "response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}},
    },
}
"""The same, to /v1/chat/completions."""

NUM_PROMPTS = 4  # of each kind; few, so that answers repeat


@dataclass(frozen=True)
class Question:
    """A request, and the texts of its completions."""

    kind: str
    path: str
    body: dict
    texts: list[str]


@dataclass(frozen=True)
class Mistake:
    """A request that must be refused."""

    kind: str
    path: str
    data: bytes
    status: int


MISTAKES = [
    Mistake("no JSON", "/v1/completions", b'{"prompt": "a', 400),
    Mistake("no object", "/v1/completions", b"[]", 400),
    Mistake("no prompt", "/v1/completions", b"{}", 400),
    Mistake("wrong type", "/v1/chat/completions", b'{"messages": [{"role": "user", "content": 5}]}', 400),
    Mistake("out of range", "/v1/completions", b'{"prompt": "a", "temperature": -1}', 400),
    Mistake("too long", "/v1/completions", json.dumps({"prompt": "word " * 4000}).encode(), 400),
    Mistake("bad grammar", "/v1/completions", b'{"prompt": "a", "structured_outputs": {"regex": "("}}', 400),
    Mistake("other model", "/v1/completions", b'{"prompt": "a", "model": "other"}', 404),
    Mistake("no endpoint", "/v1/nothing", b"{}", 404),
]


def make_questions(llm):
    """Every kind of request with some prompts each, answered by an offline engine that drafts nothing."""
    prompts = [texts[0] for texts in WORKLOADS.values()][:NUM_PROMPTS]
    questions = []
    for path, kinds in (("/v1/completions", COMPLETIONS), ("/v1/chat/completions", CHATS)):
        for kind, fields in kinds.items():
            for prompt in prompts:
                if path == "/v1/completions":
                    asked, given = {"prompt": prompt}, prompt
                else:
                    messages = [{"role": "user", "content": prompt}]
                    asked, given = {"messages": messages}, llm.get_tokenizer().apply_chat_template(messages)
                body = asked | GREEDY | fields
                (output,) = llm.generate([given], offline_params(fields), use_tqdm=False)
                questions.append(Question(kind, path, body, [completion.text for completion in output.outputs]))
    return questions


def offline_params(fields):
    """What the fields of a request mean offline."""
    named = {name: value for name, value in (GREEDY | fields).items() if name not in ("forerun", "response_format")}
    if "response_format" in fields:
        named["structured_outputs"] = {"json": fields["response_format"]["json_schema"]["schema"]}
    return SamplingParams(**named)


@dataclass
class Soak:
    """Clients that ask at random until the time is up; what went as it should is counted, the rest is reported."""

    url: str
    questions: list[Question]
    counts: Counter = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    slowest: float = 0.0  # seconds that an answer took

    async def run(self, seconds, *, num_clients, seed):
        """Let so many clients work for so long."""
        end = time.monotonic() + seconds
        async with aiohttp.ClientSession(self.url, timeout=TIMEOUT) as session, asyncio.TaskGroup() as group:
            for number in range(num_clients):
                group.create_task(self._client(session, random.Random(f"{seed}-{number}"), end))

    async def _client(self, session, source, end):
        while time.monotonic() < end and len(self.failures) < 20:
            (act,) = source.choices((self._whole, self._streamed, self._leave, self._err), (4, 5, 2, 2))
            start = time.monotonic()
            await act(session, source)
            self.slowest = max(self.slowest, time.monotonic() - start)

    async def _whole(self, session, source):
        question = source.choice(self.questions)
        async with session.post(question.path, json=question.body) as response:
            answer = await response.json()
        if response.status != 200:
            self._fail(question, f"{response.status} {answer}")
            return
        texts = {choice["index"]: _text(choice) for choice in answer["choices"]}
        self._compare(question, [texts[index] for index in sorted(texts)], "whole")

    async def _streamed(self, session, source):
        question = source.choice(self.questions)
        texts, is_done = [""] * len(question.texts), False
        async with session.post(question.path, json=question.body | {"stream": True}) as response:
            async for line in response.content:
                data = line.removeprefix(b"data: ").strip()
                if data == b"[DONE]":
                    is_done = True
                elif data:
                    chunk = json.loads(data)
                    if "error" in chunk:
                        self._fail(question, str(chunk))
                        return
                    for choice in chunk["choices"]:
                        texts[choice["index"]] += _text(choice)
        if response.status != 200 or not is_done:
            self._fail(question, f"{response.status}, done: {is_done}")
            return
        self._compare(question, texts, "streamed")

    async def _leave(self, session, source):
        """Go before the answer is whole: after some bytes of a stream, or while nothing has come yet."""
        question, stream = source.choice(self.questions), source.random() < 0.5
        try:
            async with asyncio.timeout(source.uniform(0, 0.5)):
                async with session.post(question.path, json=question.body | {"stream": stream}) as response:
                    for _ in range(source.randrange(1, 6)):
                        await response.content.readany()
                    response.close()
        except TimeoutError:
            pass
        self.counts["left"] += 1

    async def _err(self, session, source):
        mistake = source.choice(MISTAKES)
        headers = {"Content-Type": "application/json"}
        async with session.post(mistake.path, data=mistake.data, headers=headers) as response:
            answer = await response.json()
        if response.status != mistake.status or not answer["error"]["message"]:
            self.failures.append(f"{mistake.kind}: {response.status} {answer}")
        self.counts[mistake.kind] += 1

    def _compare(self, question, texts, how):
        if texts != question.texts:
            self._fail(question, f"{how}: {texts!r} instead of {question.texts!r}")
        self.counts[question.kind] += 1

    def _fail(self, question, what):
        self.failures.append(f"{question.kind} {json.dumps(question.body)[:200]}: {what}")


def _text(choice):
    if "text" in choice:
        return choice["text"]
    return (choice.get("message") or choice["delta"]).get("content") or ""
