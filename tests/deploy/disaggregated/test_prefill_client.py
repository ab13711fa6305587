"""Whoever reads prompts is asked, heard and given up, and no prompt is waited for in vain."""

from __future__ import annotations

import errno
import os
import time

import pytest

from forerun.deploy.disaggregated import channel
from forerun.deploy.disaggregated.prefill_client import PrefillClient
from tests.deploy.disaggregated.in_one_process import channels, needs_shared_memory

pytestmark = needs_shared_memory
PATIENCE_S = 0.3


@pytest.fixture
def ends():
    with channels() as both:
        yield both


@pytest.fixture
def client(ends):
    return PrefillClient(ends[0], end_of=lambda: "process 7 was killed (signal 9)", patience=PATIENCE_S)


def taken(client, seconds=5.0):
    """What comes until something does."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if (arrival := client.take(0.01)) is not None:
            return arrival
    return None


def test_a_process_that_says_nothing_is_given_up_and_its_prompts_come_back(client):
    client.read("a", [1, 2, 3], None)
    client.read("b", [4, 5, 6], None)
    arrivals = [taken(client), taken(client)]
    assert [one.request_id for one in arrivals] == ["a", "b"]
    assert all(one.kv is None for one in arrivals)
    assert "it had said nothing for 0.3 s, and process 7 was killed (signal 9)" in arrivals[0].error
    assert client.is_over


def test_a_process_that_goes_on_is_waited_for(client, ends):
    client.read("a", [1, 2, 3], None)
    until = time.monotonic() + 3 * PATIENCE_S
    while time.monotonic() < until:
        ends[1].send({})
        assert client.take(0.05) is None
    assert not client.is_over


def test_a_process_that_has_no_prompts_may_say_nothing(client):
    client.read("a", [1, 2, 3], None)
    client.cancel("a")
    time.sleep(1.5 * PATIENCE_S)
    assert client.take(0) is None
    client.read("b", [1, 2, 3], None)
    assert client.take(0) is None
    assert not client.is_over


def test_a_prompt_that_cannot_be_sent_comes_back_and_the_next_is_sent(client, ends, monkeypatch):
    def no_descriptor(_tensors):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(channel, "_shared", no_descriptor)
        client.read("a", [1, 2, 3], None)
    arrival = client.take(0)
    assert (arrival.request_id, arrival.kv) == ("a", None)
    assert "could not be asked ([Errno 24] Too many open files)" in arrival.error
    assert client.take(0) is None
    client.read("b", [4, 5, 6], None)
    assert ends[1].receive(5).tensors[0].tolist() == [4, 5, 6]


def test_the_answer_to_a_question_that_was_cancelled_is_not_taken_for_another_prompt_of_the_same_id(client, ends):
    client.read("a", [1, 2, 3, 4], None)
    client.cancel("a")
    client.read("a", [5, 6, 7, 8], None)
    asked = [message.header["read"] for message in iter(lambda: ends[1].receive(0.5), None) if message.tensors]
    for name in asked:  # the process had read the first prompt before it heard that nobody wants it
        ends[1].send({"request": name, "error": f"of question {asked.index(name)}"})
    assert taken(client).error == "of question 1"
    assert taken(client, 0.1) is None
