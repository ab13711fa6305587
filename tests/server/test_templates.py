"""Chat templates in processes of their own: the same text, and no harm, whatever they do."""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest
from jinja2 import TemplateError

from forerun.models.tokenizer import load_tokenizer
from forerun.server.templates import Templates
from tests.engines import native_target, tiny_llm
from tests.server.served import CHAT, PROMPT, chat_ids, served
from tests.server.test_load import until
from tests.tiny_tokenizer import CHAT_TEMPLATE, save_tiny_tokenizer

MOST_SECONDS = 0.3
USER = {"role": "user", "content": "h\u00e9 \U0001f600 \u4f60"}
HANG = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
ESCAPES = (
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.environ }}",
    "{{ messages.__class__.__init__.__globals__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ messages.append(1) }}",
    "{{ namespace(__class__=1) }}",
    "{% set f = '{0.__class__}' %}{{ f.format(messages) }}",
    "{% include '/etc/passwd' %}",
)


def children():
    """The processes that this one has started and not yet waited for."""
    return set(psutil.Process().children())


@pytest.fixture
def started():
    """A function that returns the processes of this test."""
    before = children()
    return lambda: children() - before


@pytest.fixture(scope="module")
def templates():
    before = children()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("forerun.server.templates.MOST_SECONDS", MOST_SECONDS)
        templates = Templates()
        yield templates
        templates.close()
    assert children() <= before


def render(templates, template, **variables):
    return templates.render(template, [USER], add_generation_prompt=True, variables=variables)


def test_the_text_is_the_one_that_it_would_be_here(templates, tmp_path):
    tokenizer = load_tokenizer(save_tiny_tokenizer(tmp_path))
    for talk in ([USER], [USER, {"role": "assistant", "content": "", "name": None}], [USER] * 100):
        assert tokenizer.apply_chat_template(talk, render=templates.render) == tokenizer.apply_chat_template(talk)
    assert render(templates, "{{ bos_token }}{{ messages[0].content }}", bos_token="<s>") == "<s>" + USER["content"]


@pytest.mark.parametrize("template", ESCAPES)
def test_a_template_does_not_get_out_of_its_sandbox(templates, template):
    with suppress(TemplateError):
        assert render(templates, template) == ""


@pytest.mark.parametrize("template", ["{{ 1 / 0 }}", "{{ messages.x.y }}", "{% if %}", "{{ raise_exception('no') }}"])
def test_what_a_template_cannot_do_is_an_error(templates, template):
    with pytest.raises(TemplateError):
        render(templates, template)


@pytest.mark.parametrize(
    "template",
    [
        HANG,
        "{{ 10 ** (10 ** 10) }}",
        "{{ 'a' * 10 ** 10 }}",
        "{{ 'a'.center(10 ** 10) }}",
        "{{ '%10000000000d' % 1 }}",
        "{{ 'a' * 10 ** 8 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for i in range(99999) %}{{ 'a' * 10 ** 6 }}{% endfor %}",
    ],
)
def test_time_memory_and_text_have_an_end(templates, template):
    before = time.monotonic()
    with pytest.raises(TemplateError):
        render(templates, template)
    assert time.monotonic() - before < 30
    assert render(templates, "{{ messages[0].role }}") == "user"


def test_it_knows_no_keys(monkeypatch, started):
    monkeypatch.setenv("FORERUN_API_KEY", "secret")
    monkeypatch.setenv("HF_TOKEN", "secret")
    templates = Templates()
    templates.prepare()
    (process,) = started()
    assert "secret" not in process.environ().values()
    templates.close()
    assert not started()


def test_ctrl_c_at_the_servers_terminal_is_not_for_them(started):
    templates = Templates()
    render(templates, "a")
    (process,) = started()
    assert os.getsid(process.pid) != os.getsid(0)
    templates.close()


def test_one_that_answers_while_they_are_closed_is_ended_too(monkeypatch, started):
    templates = Templates()

    def late(answer):
        templates.close()
        return json.loads(answer)

    monkeypatch.setattr("forerun.server.templates.json", SimpleNamespace(dumps=json.dumps, loads=late))
    assert render(templates, "a") == "a"
    assert not started()


def test_closing_waits_for_no_template(monkeypatch, started):
    monkeypatch.setattr("forerun.server.templates.MOST_SECONDS", 1000.0)
    templates = Templates()
    render(templates, "a")
    (process,) = started()
    before = process.cpu_times().user
    with ThreadPoolExecutor(1) as threads:
        hanging = threads.submit(render, templates, HANG)
        until(lambda: process.cpu_times().user > before + 0.1)
        templates.close()
        with pytest.raises(TemplateError):
            hanging.result(30)
    assert not started()


def test_one_that_has_died_is_replaced(started):
    templates = Templates()
    render(templates, "a")
    (process,) = started()
    process.kill()
    until(lambda: process.status() == psutil.STATUS_ZOMBIE)
    assert render(templates, "a") == "a"
    assert process not in started()
    templates.close()


@pytest.mark.parametrize(
    "resource",
    [
        "raise ModuleNotFoundError",  # Windows
        "RLIMIT_CORE = RLIMIT_FSIZE = RLIMIT_AS = 0\ndef setrlimit(*_): raise ValueError('may not')",  # macOS
        "RLIMIT_CORE = 0\ndef setrlimit(*_): raise OSError",
    ],
)
def test_limits_that_the_system_does_not_have_are_left_out(tmp_path, monkeypatch, resource):
    (tmp_path / "resource.py").write_text(resource)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", ""))))
    templates = Templates()
    assert render(templates, "{{ messages[0].role }}") == "user"
    templates.close()


def test_where_there_are_no_timers_the_server_ends_what_hangs(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text("import signal\ndel signal.setitimer")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", ""))))
    monkeypatch.delattr("signal.setitimer")
    monkeypatch.setattr("forerun.server.templates.MOST_WALL_SECONDS", 3.0)
    templates = Templates()
    assert render(templates, "{{ messages[0].role }}") == "user"
    with pytest.raises(TemplateError, match="too long"):
        render(templates, HANG)
    templates.close()


def test_a_model_whose_template_hangs_harms_nobody(tmp_path, monkeypatch):
    monkeypatch.setattr("forerun.server.templates.MOST_SECONDS", MOST_SECONDS)
    template = "{% if messages[0].content == 'hang' %}" + HANG + "{% endif %}" + CHAT_TEMPLATE
    tokenizer = load_tokenizer(save_tiny_tokenizer(tmp_path, chat_template=template))
    target = replace(native_target(), tokenizer=tokenizer)
    hang = {"messages": [{"role": "user", "content": "hang"}], "max_tokens": 1}
    with served(tiny_llm(target=target)) as server, ThreadPoolExecutor(1) as threads:
        hanging = threads.submit(server.send, "POST", "/v1/chat/completions", hang)
        answer = server.post("/v1/chat/completions", {"messages": CHAT, "max_tokens": 1, "return_token_ids": True})
        assert answer["prompt_token_ids"] == chat_ids(CHAT)
        assert server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 1})["choices"]
        status, _, answer = hanging.result()
        assert (status, answer["error"]["param"]) == (400, "messages")
        assert "too long" in answer["error"]["message"]
