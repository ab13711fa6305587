"""Clients that send or read too slowly, and too many of them."""

from __future__ import annotations

import json
import resource
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager

import pytest

from forerun.server.app import MOST_BODY_BYTES
from forerun.server.connections import LINGER_S, OTHER_FILES, READ_BYTES, Connection, room_for
from tests.server.served import PROMPT, chat_llm, served
from tests.server.test_load import SlowSteps, until

TIMEOUT_S = 0.4
HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n"
)
GET = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.fixture(scope="module")
def impatient():
    with served(chat_llm(), client_timeout=TIMEOUT_S) as server:
        yield server


@pytest.fixture(scope="module")
def keyed():
    with served(chat_llm(), api_key=("secret",)) as server:
        yield server


@contextmanager
def connected(server, sent=b""):
    with socket.create_connection(("127.0.0.1", server.server.port), timeout=10) as sock:
        sock.sendall(sent)
        yield sock


def rest(sock):
    """All that comes until the server closes."""
    parts = []
    try:
        while part := sock.recv(1 << 16):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def parsed(answer):
    """(status, JSON) of an answer as it came."""
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


@pytest.mark.parametrize(
    "sent", [b"G", b"GET /health HTTP/1.1\r\nHost: x\r\n", HEAD, HEAD + b"{", HEAD.replace(b"/v1/", b"/odd/")]
)
def test_a_request_that_does_not_arrive_in_time_is_408(impatient, sent):
    with connected(impatient, sent) as sock:
        begin = time.monotonic()
        *_, last = rest(sock).split(b"HTTP/1.1 ")
        assert TIMEOUT_S / 2 < time.monotonic() - begin < 20 * TIMEOUT_S
    if b"/odd/" in sent:
        assert last.startswith(b"404")  # nobody waits for its body before the answer, nor for ever after
        return
    status, answer = parsed(b"HTTP/1.1 " + last)
    assert (status, answer["error"]["type"]) == (408, "invalid_request_error")
    assert impatient.send("GET", "/health")[0] == 200


@pytest.mark.parametrize("begun", [HEAD, HEAD + b"{", b"GET /health HTTP/1.1\r\nHost: x\r\n"])
def test_one_that_begins_behind_another_has_no_longer_to_arrive(impatient, begun):
    """The fault: the time of a request that came with the one before it never started, so it held its connection for ever."""
    with connected(impatient, GET + begun) as sock:
        answers = rest(sock).split(b"HTTP/1.1 ")[1:]
    assert [int(answer.split()[0]) for answer in answers] == [200, 408]


def test_a_body_in_chunks_of_a_byte_leaves_others_their_turns(plain, monkeypatch):
    """The fault: of such a body the event loop read as much at once as takes it a second, for anybody without a key too."""
    sizes, take = [], Connection.data_received

    def noting(connection, data):
        sizes.append(len(data))
        take(connection, data)

    monkeypatch.setattr(Connection, "data_received", noting)
    head = HEAD.replace(b"Content-Length: 100", b"Transfer-Encoding: chunked")
    with connected(plain, head + b"1\r\n \r\n" * 10_000 + b"2\r\n{}\r\n0\r\n\r\n") as sock:
        assert sock.recv(100).startswith(b"HTTP/1.1 400")
    assert sum(sizes) > 50_000
    assert max(sizes) <= READ_BYTES


def test_a_drop_now_and_then_does_not_prolong_it(impatient):
    def drip(sock):
        end = time.monotonic() + 10
        while time.monotonic() < end:
            sock.sendall(b"X-More: 1\r\n")
            time.sleep(0.05)

    with connected(impatient, b"GET /health HTTP/1.1\r\n") as sock, pytest.raises(OSError):
        drip(sock)


def test_a_connection_on_which_nothing_comes_is_closed_without_a_word(impatient):
    with connected(impatient) as sock:
        assert rest(sock) == b""


@pytest.mark.parametrize(
    ("sent", "status"),
    [(b"GET /health HTTP/1.1\r\nHost: x\r\nX-Large: " + b"a" * 40_000, 431), (b"nothing of the kind\r\n\r\n", 400)],
)
def test_who_is_refused_reads_why_though_more_was_sent(impatient, sent, status):
    with connected(impatient, sent) as sock:
        head = sock.recv(1 << 16)
        sock.sendall(b"a" * 60_000)
        found, answer = parsed(head + rest(sock))
    assert (found, answer["error"]["type"]) == (status, "invalid_request_error")
    assert impatient.send("GET", "/health")[0] == 200


@pytest.mark.parametrize("waits", [False, True], ids=["before the answer", "behind the answer"])
def test_a_body_that_turns_into_nonsense_is_no_line_in_the_log(keyed, caplog, waits):
    begun = b"GET /health HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n"
    with connected(keyed, begun if waits else begun + b"nonsense\r\n") as sock:
        answer = sock.recv(1 << 16)
        if waits:
            sock.sendall(b"nonsense\r\n")
        assert (answer + rest(sock)).count(b"HTTP/1.1") == 1
    assert int(answer.split()[1]) == (200 if waits else 400)
    until(lambda: not keyed.server._server.server_state.connections)
    assert not caplog.records


def upload(version, headers):
    """The head of a request whose body is twice what a server takes, and that body."""
    head = b"POST /v1/completions HTTP/%s\r\nHost: localhost\r\nContent-Type: application/json\r\n" % version
    return head + headers + b"Content-Length: %d\r\n\r\n" % (2 * MOST_BODY_BYTES), b" " * (2 * MOST_BODY_BYTES)


@pytest.mark.parametrize(
    ("version", "headers"),
    [(b"1.1", b"Connection: close\r\n"), (b"1.0", b""), (b"1.1", b"Connection: keep-alive\r\n")],
)
@pytest.mark.parametrize(("key", "status"), [(b"secret", 413), (b"wrong", 401)])
def test_who_is_refused_reads_why_though_the_whole_body_was_sent(keyed, version, headers, key, status):
    head, body = upload(version, headers + b"Authorization: Bearer %s\r\n" % key)
    with connected(keyed, head) as sock:
        for begin in range(0, len(body), 1 << 20):
            time.sleep(0.02)  # so that the answer, and the end of the connection, come before the body's
            sock.sendall(body[begin : begin + (1 << 20)])
        answer = sock.recv(1 << 16) if b"keep-alive" in headers else rest(sock)
    assert parsed(answer)[0] == status
    until(lambda: not keyed.server._limits.waiting)


def test_a_connection_with_a_body_that_is_not_read_ends_when_the_client_falls_silent(keyed):
    head, body = upload(b"1.1", b"Connection: close\r\n")
    with connected(keyed, head + body[:1000]) as sock:
        assert parsed(rest(sock))[0] == 401
        connections = keyed.server._server.server_state.connections
        assert len(connections) == 1
        begin = time.monotonic()
        until(lambda: not connections)
        assert time.monotonic() - begin < 2 * LINGER_S


@pytest.mark.parametrize("sent", [upload(b"1.1", b"Connection: close\r\n")[0], b"nothing of the kind\r\n\r\n"])
def test_what_is_not_read_has_no_longer_to_come_than_what_is(impatient, sent):
    def drip(sock):
        end = time.monotonic() + 10
        while time.monotonic() < end:
            sock.sendall(b"a")
            time.sleep(0.05)

    with connected(impatient, sent) as sock, pytest.raises(OSError):
        drip(sock)


def test_between_two_requests_there_is_more_time(impatient):
    connection = impatient.connection()
    for _ in range(2):
        connection.request("GET", "/health")
        assert connection.getresponse().read() == b""
        sock = connection.sock
        time.sleep(2 * TIMEOUT_S)
    assert connection.sock is sock
    connection.close()


def test_an_answer_may_take_longer(impatient):
    llm = impatient.llm
    step = llm.engine.step
    SlowSteps(llm, TIMEOUT_S / 4)
    try:
        assert impatient.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 12, "ignore_eos": True})["choices"]
    finally:
        llm.engine.step = step


def test_a_client_that_does_not_read_is_left():
    with served(chat_llm(), client_timeout=TIMEOUT_S) as server:
        server.server._server.servers[0].sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        body = json.dumps({"prompt": PROMPT, "n": 16, "max_tokens": 60, "logprobs": 20, "stream": True}).encode()
        with connected(server, HEAD.replace(b"100", b"%d" % len(body)) + body):
            until(lambda: server.model.admission.num_inside == 16)
            until(lambda: server.model.admission.num_inside == 0)


def test_too_many_that_wait_give_way_to_who_comes_with_a_request():
    with served(chat_llm(), max_connections=3) as server, ExitStack() as stack:
        slow = [stack.enter_context(connected(server, sent)) for sent in (HEAD, b"G", b"")]
        until(lambda: len(server.server._server.server_state.connections) == 3)
        assert server.send("GET", "/health")[0] == 200
        assert parsed(rest(slow[0]))[0] == 503
        slow[2].sendall(GET)
        assert slow[2].recv(100).startswith(b"HTTP/1.1 200")


def test_too_many_that_are_served_are_left_alone():
    llm = chat_llm()
    SlowSteps(llm)
    body = {"prompt": PROMPT, "max_tokens": 60, "ignore_eos": True, "stream": True}
    with served(llm, max_connections=2) as server:
        running = [server.connection() for _ in range(2)]
        for connection in running:
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answers = [connection.getresponse() for connection in running]
        with connected(server) as sock:
            status, answer = parsed(rest(sock))
            assert (status, answer["error"]["type"]) == (503, "service_unavailable_error")
        assert all(answer.read().endswith(b"[DONE]\n\n") for answer in answers)
        for connection in running:
            connection.close()
        assert server.send("GET", "/health")[0] == 200


def test_there_are_no_more_connections_than_open_files():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (OTHER_FILES + 100, before[1]))
        assert room_for(50) == 50
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == OTHER_FILES + 100
        assert room_for(200) == 200
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == OTHER_FILES + 200
        assert before[1] == resource.RLIM_INFINITY or room_for(before[1]) == before[1] - OTHER_FILES
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_request_of_two_lengths_is_the_last_of_its_connection(plain):
    """RFC 9112, section 6.3: a proxy may believe the other length, and what follows would be smuggled past it."""
    body = b'{"prompt": "a", "max_tokens": 1}'
    chunked = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    head = HEAD.replace(b"\r\n\r\n", b"\r\nConnection: keep-alive\r\nTransfer-Encoding: chunked\r\n\r\n")
    with connected(plain, head + chunked + GET) as sock:
        answer = rest(sock)
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"connection: close" in answer.lower()
    assert answer.count(b"HTTP/1.1") == 1


def test_a_request_of_one_length_keeps_its_connection(plain):
    with connected(plain, GET + GET.replace(b"Host: x", b"Host: x\r\nConnection: close")) as sock:
        assert rest(sock).count(b"HTTP/1.1 200") == 2


def test_where_open_files_are_not_limited_there_is_room_for_all(monkeypatch):
    monkeypatch.setattr("forerun.server.connections.resource", None)
    assert room_for(5000) == 5000


def test_nothing_here_needs_a_module_that_windows_has_not():
    hidden = "import sys; sys.modules |= dict.fromkeys(('resource', 'fcntl', 'pwd', 'grp', 'termios'))"
    program = f"{hidden}; import forerun.server.connections, forerun.server.templates"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
