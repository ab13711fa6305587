"""Holes that other inference servers had, and where each is shown to be closed here.

pickle over sockets, sockets on all interfaces, weights that run code   below
code that comes with a model                                            below, tests/models/test_loader.py
templates that escape, hang or flood                                    test_templates.py; below
grammars that hang, flood or overflow the compiler                      below, tests/grammar/test_compiler.py
unbounded n, prompts, stops, headers, bodies                            below, test_errors.py
options that kill the engine with drafts                                test_sampling_fuzz.py
`eval` of what came in                                                  below
keys: time to compare, spelling of the path, before the body            test_auth.py
pages whose names come to mean this machine (DNS rebinding)             test_auth.py
pages of elsewhere that send what browsers do not ask about              below
clients that are slow, silent, or too many                              test_connections.py
requests of two lengths, which smuggle others past a proxy              test_connections.py
URLs that the server fetches                                            below
"""

from __future__ import annotations

import ast
import functools
import json
import pickle
import socket
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

import forerun
from forerun.errors import ModelError
from forerun.models.tokenizer import load_tokenizer
from forerun.server.protocol import MOST_COMPLETIONS, MOST_MESSAGES, MOST_PROMPTS, MOST_STOPS
from tests.server.served import CHAT, NAME, PROMPT, chat_ids, chat_llm, served
from tests.tiny_tokenizer import save_tiny_tokenizer

UNPICKLING_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
UNPICKLED_FROM_OWN_PROCESSES = {  # never from a socket that others reach
    ("contents.py", "pickle"),  # the same: a drafter's weights, which rank 0 lends the others
    ("exchange.py", "pickle"),  # the ranks of a tensor-parallel group: anonymous memory that their parent gave them
    ("prefix_router.py", "pickle"),  # Ray's proxy hands its requests to the router so
}
UNSAFE_METHODS = {"recv_pyobj", "send_pyobj", "Listener"}  # of zmq and multiprocessing: they unpickle what comes
UNSAFE_CALLS = {"eval", "exec", "compile", "__import__"}


@functools.cache
def nodes_by_kind():
    """Of all sources: kind -> (name of the file, node)."""
    found = defaultdict(list)
    for path in sorted(Path(forerun.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            found[type(node)].append((path.name, node))
    return found


def nodes(kind):
    return nodes_by_kind()[kind]


class Touch:
    """Creates a file where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("content_type", ["application/json", "application/octet-stream", "application/python-pickle"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_what_comes_over_a_socket_is_not_unpickled(
    plain, tmp_path, path, content_type
):  # CVE-2025-47277, CVE-2026-3059
    sent = pickle.dumps(Touch(tmp_path / "ran"))
    assert plain.send("POST", path, sent, {"Content-Type": content_type})[0] == 400
    with socket.create_connection(("127.0.0.1", plain.server.port)) as raw:
        raw.sendall(sent)
        raw.shutdown(socket.SHUT_WR)
        raw.settimeout(10)
        raw.recv(65536)
    assert not (tmp_path / "ran").exists()
    pickle.loads(sent)
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("module", sorted(UNPICKLING_MODULES), ids="{} CVE-2025-47277 CVE-2026-3059".format)
def test_no_module_that_unpickles_is_imported(module):
    imported = {(file, alias.name) for file, node in nodes(ast.Import) for alias in node.names}
    imported |= {(file, node.module) for file, node in nodes(ast.ImportFrom)}
    importing = {(file, name) for file, name in imported if name and name.partition(".")[0] == module}
    assert importing <= UNPICKLED_FROM_OWN_PROCESSES


def test_no_socket_unpickles_what_comes():
    assert [name for name, node in nodes(ast.Attribute) if node.attr in UNSAFE_METHODS] == []


def loads(*functions: str) -> list[tuple[str, dict[str, object]]]:
    """Calls of these functions in forerun: the file and the constants named in the call."""
    return [
        (name, {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords})
        for name, node in nodes(ast.Call)
        if ast.unparse(node.func) in functions
    ]


def test_only_one_small_file_is_read_by_torch_and_as_weights_only():  # CVE-2025-62164, CVE-2025-32434, CVE-2026-24747
    found = loads("torch.load", "torch.jit.load")
    assert [(name, given["weights_only"]) for name, given in found] == [("dflash.py", True)]


def test_no_array_file_may_hold_a_pickle():  # CVE-2019-6446
    found = loads("np.load", "numpy.load")
    assert found
    assert [name for name, given in found if given.get("allow_pickle") is not False] == []


@pytest.mark.parametrize("call", sorted(UNSAFE_CALLS), ids="{} CVE-2025-9141".format)
def test_nothing_that_came_in_is_run_as_python(call):
    assert [name for name, node in nodes(ast.Call) if ast.unparse(node.func) == call] == []


def test_the_server_listens_on_one_loopback_address_unless_told_otherwise():  # CVE-2025-30202
    def listening():
        return {c.laddr for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN}

    before = listening()
    with served(chat_llm()) as server:
        server.post("/v1/chat/completions", {"messages": CHAT, "max_tokens": 1})
        (address,) = listening() - before
        assert tuple(address) == ("127.0.0.1", server.server.port)
        for child in psutil.Process().children(recursive=True):
            assert child.net_connections("inet") == []


def test_a_tokenizer_that_brings_code_does_not_run_it(tmp_path):  # CVE-2026-22807
    save_tiny_tokenizer(tmp_path)
    ran = tmp_path / "ran"
    (tmp_path / "tokenization_evil.py").write_text(f"open({str(ran)!r}, 'w')\n")
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config |= {
        "tokenizer_class": "Evil",
        "auto_map": {"AutoTokenizer": ["tokenization_evil.Evil", "tokenization_evil.Evil"]},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with suppress(ModelError):
        load_tokenizer(tmp_path)
    assert not ran.exists()


@pytest.mark.parametrize("text", ["{{ 7 * 7 }}", "{% for i in range(9999) %}a{% endfor %}", "{{ messages.__class__ }}"])
def test_what_a_message_says_is_no_template(plain, text):  # CVE-2026-5760
    for message in ({"role": "user", "content": text}, {"role": text[:64], "content": "a"}):
        answer = plain.post("/tokenize", {"messages": [message]})
        assert answer["tokens"] == chat_ids([message])


@pytest.mark.parametrize("field", ["chat_template", "chat_template_kwargs"])
def test_no_template_comes_with_a_request(plain, field):  # CVE-2025-62426
    body = {"messages": CHAT, field: "{{ 1 }}" if field == "chat_template" else {"chat_template": "{{ 1 }}"}}
    for path in ("/v1/chat/completions", "/tokenize"):
        status, _, answer = plain.send("POST", path, body)
        assert (status, answer["error"]["param"]) == (400, field)


NESTED_TAG = json.loads('{"type": "sequence", "elements": [' * 300 + '{"type": "any_text"}' + "]}" * 300)
NESTED = json.loads('{"items": ' * 300 + "{}" + "}" * 300)


@pytest.mark.parametrize(
    "wanted",
    [
        {"regex": "(" * 5000 + ")" * 5000},
        {"regex": "((a{0,1000}){0,1000}){0,1000}"},
        {"regex": "["},
        {"grammar": "start: " + "(" * 20_000 + '"a"' + ")" * 20_000},
        {"grammar": "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000},
        {"json": NESTED},
        {"json": {"$ref": "http://127.0.0.1:1/schema.json"}},
        {"json": {"type": "string", "pattern": "(" * 1000}},
        {"choice": ["a" * 1000] * 4000},
        {"structural_tag": {"type": "structural_tag", "format": NESTED_TAG}},
        {"structural_tag": {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": NESTED}}},
    ],
    ids=lambda wanted: next(iter(wanted)) + " CVE-2025-48944 GHSA-389x-67px-mjg3",
)
def test_no_grammar_takes_the_server_down(plain, wanted):
    status, _, answer = plain.send(
        "POST", "/v1/completions", {"prompt": PROMPT, "max_tokens": 2, "structured_outputs": wanted}
    )
    assert status in (200, 400), answer
    assert plain.send("GET", "/health")[0] == 200
    assert plain.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 1})["choices"]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"n": MOST_COMPLETIONS + 1}),
        ("/v1/completions", {"best_of": 10**9}),
        ("/v1/completions", {"prompt": [PROMPT] * (MOST_PROMPTS + 1)}),
        ("/v1/completions", {"prompt": [[1]] * (MOST_PROMPTS + 1)}),
        ("/v1/completions", {"prompt": []}),
        ("/v1/completions", {"prompt": ""}),
        ("/v1/completions", {"stop": ["a"] * (MOST_STOPS + 1)}),
        ("/v1/completions", {"max_tokens": 10**12}),
        ("/v1/chat/completions", {"n": 10**9}),
        ("/v1/chat/completions", {"messages": CHAT * (MOST_MESSAGES + 1)}),
    ],
    ids="{} CVE-2026-34756".format,
)
def test_no_number_in_a_request_is_without_bound(plain, path, fields):
    begin = time.monotonic()
    status, _, _ = plain.send("POST", path, {"prompt": PROMPT, "messages": CHAT} | fields)
    assert status == 400
    assert time.monotonic() - begin < 5


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "video_url", "file", "input_image"])
@pytest.mark.parametrize("scheme", ["http", "file"])
def test_no_url_is_fetched(plain, kind, scheme):  # CVE-2026-24779
    with socket.create_server(("127.0.0.1", 0)) as inside:
        inside.settimeout(0.05)
        url = f"http://127.0.0.1:{inside.getsockname()[1]}/secret" if scheme == "http" else "file:///etc/hostname"
        part = {"type": kind, kind: {"url": url, "file_url": url, "data": url}}
        for content in ([part], [{"type": "text", "text": "a"}, part]):
            body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
            for path in ("/v1/chat/completions", "/tokenize"):
                status, _, answer = plain.send("POST", path, body)
                assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
        with pytest.raises(TimeoutError):
            inside.accept()


@pytest.mark.parametrize(
    "content_type", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"]
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_what_a_page_of_elsewhere_may_send_unasked_is_not_read(plain, path, content_type):
    connection = plain.connection()
    headers = {} if content_type is None else {"Content-Type": content_type}
    connection.request("POST", path, json.dumps({"prompt": PROMPT, "messages": CHAT}), headers)
    assert connection.getresponse().status == 400
    connection.close()


@pytest.mark.parametrize("host", ["evil.example", "x/health", "x?/metrics", ""])
@pytest.mark.parametrize("path", ["/v1/models/", "/health/", "//evil.example/v1/models", "/v1/models/..%2f..%2fhealth"])
def test_no_answer_sends_clients_where_the_host_header_says(plain, host, path):  # CVE-2026-48710
    status, headers, answer = plain.send("GET", path, headers={"Host": host})
    assert status in (400, 403, 404)
    assert headers["Location"] is None
    assert NAME not in json.dumps(answer).replace(f"use '{NAME}'", "")
