"""Ctrl-C in tests."""

from __future__ import annotations

import itertools


def interrupt(monkeypatch, owner, name, *, at):
    """Let Ctrl-C come at a call of a method, whose number is given."""
    method, calls = getattr(owner, name), itertools.count(1)

    def interrupted(*args, **options):
        if next(calls) == at:
            raise KeyboardInterrupt
        return method(*args, **options)

    monkeypatch.setattr(owner, name, interrupted)
