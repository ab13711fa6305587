"""Messages arrive as they were sent, however large, and an end that is closed is noticed."""

from __future__ import annotations

import os
import socket
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.deploy.disaggregated import channel
from forerun.deploy.disaggregated.channel import Channel
from tests.deploy.disaggregated.in_one_process import channels, needs_shared_memory

pytestmark = needs_shared_memory
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8]


@given(
    shapes=st.lists(
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), min_size=1, max_size=3)), max_size=4
    ),
    text=st.text(max_size=20),
)
@settings(max_examples=30, deadline=None)
def test_what_is_sent_arrives(shapes, text):
    tensors = [torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype) for dtype, shape in shapes]
    with channels() as (own, other):
        own.send({"text": text}, tensors)
        message = other.receive(5)
        assert message.header == {"text": text}
        assert [one.dtype for one in message.tensors] == [one.dtype for one in tensors]
        assert all(a.equal(b) for a, b in zip(message.tensors, tensors, strict=True))


def test_neither_end_waits_for_the_other_to_read():
    long = {"text": "x" * 100_000}
    with channels() as (own, other):
        for _ in range(50):
            own.send(long, [torch.ones(1000)])
            other.send(long)
        assert all(other.receive(5).header == long for _ in range(50))
        assert all(own.receive(5).header == long for _ in range(50))
        assert own.receive(0) is None


def test_the_memory_is_given_back_with_the_last_tensor():
    before = len(os.listdir("/proc/self/fd"))
    with channels() as (own, other):
        for _ in range(20):
            own.send({}, [torch.ones(100)])
            assert other.receive(5).tensors[0].sum() == 100
        with open("/proc/self/maps") as maps:
            assert maps.read().count("forerun-kv") <= 1, "at most the last one, if it is still in a variable"
    assert len(os.listdir("/proc/self/fd")) <= before + 1


def test_an_end_that_is_closed_is_noticed_by_who_waits_and_by_who_comes_later():
    with channels() as (own, other):
        threading.Timer(0.05, own.close).start()
        with pytest.raises(EOFError):
            other.receive(5)
        with pytest.raises(EOFError):
            other.receive(0)
        with pytest.raises(BrokenPipeError):
            other.send({}, [torch.ones(1)])


def test_a_message_that_an_interrupt_may_have_cut_is_the_last_one(monkeypatch):
    send = socket.send_fds

    def interrupted(*args):
        send(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(socket, "send_fds", interrupted)
    with channels() as (own, other):
        with pytest.raises(KeyboardInterrupt):
            own.send({"number": 1})
        with pytest.raises(EOFError):
            other.receive(5)


def test_tensors_whose_descriptor_was_dropped_are_reported_and_the_next_ones_arrive(monkeypatch):
    receive = socket.recv_fds

    def without_descriptors(*args):
        """As the system receives for a process that has as many descriptors as it may."""
        content, descriptors, flags, address = receive(*args)
        for descriptor in descriptors:
            os.close(descriptor)
        return content, [], flags, address

    monkeypatch.setattr(socket, "recv_fds", without_descriptors)
    with channels() as (own, other):
        own.send({"number": 1}, [torch.ones(3)])
        message = other.receive(5)
        assert message.header == {"number": 1}
        assert message.tensors == ()
        assert "Too many open files" in message.error
        monkeypatch.setattr(socket, "recv_fds", receive)
        own.send({"number": 2}, [])  # for which the thread that reads had called the other one already
        own.send({"number": 3}, [torch.ones(3)])
        assert [other.receive(5).header["number"], other.receive(5).tensors[0].sum()] == [2, 3]


def test_nobody_waits_for_ever_to_send_to_a_process_that_is_stopped(monkeypatch):
    monkeypatch.setattr(channel, "SEND_TIMEOUT_S", 1)
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    own = Channel(ends[0])
    with ends[1]:  # which nobody reads

        def send_many():
            for _ in range(10_000):
                own.send({"text": "x" * 1000})

        with pytest.raises(BlockingIOError):
            send_many()
        with pytest.raises(EOFError):
            own.receive(5)
    own.close()
