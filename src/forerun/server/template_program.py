"""A program of its own that lays out conversations by chat templates: it may hang, eat memory or die without harm.

For each line of JSON that it reads, the arguments of `chat_template.render`, it writes one,
{"text": ...} or {"error": ...}. Its argument is the time for one, in seconds of CPU. It runs by its path,
and so does not import the server. Limits that the system does not have (memory on macOS and Windows, CPU
time on Windows) are left out.
"""

from __future__ import annotations

import json
import signal
import sys
from contextlib import suppress
from typing import Any

from forerun.models.chat_template import render

try:
    import resource
except ModuleNotFoundError:  # Windows
    resource = None  # type: ignore[assignment]

MOST_BYTES = 2 << 30  # of address space


def lay_out(arguments: dict[str, Any]) -> dict[str, str]:
    """The conversation's text, or why there is none."""
    try:
        return {"text": render(**arguments)}
    except Exception as error:  # a template may raise whatever Python can
        said, kind = str(error), type(error).__name__
        return {"error": f"{kind}: {said}" if isinstance(error, KeyError) else said or kind}


def limit() -> None:
    """Set the limits that this system has."""
    if resource is None:
        return
    for name, most in (("RLIMIT_CORE", 0), ("RLIMIT_FSIZE", 0), ("RLIMIT_AS", MOST_BYTES)):
        with suppress(AttributeError, OSError, ValueError):  # macOS refuses RLIMIT_AS
            resource.setrlimit(getattr(resource, name), (most, most))


def set_timer(seconds: float) -> None:
    """Let the process be killed after so much CPU time; 0 stops the timer."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)


def main() -> None:
    """Answer line by line; where a conversation takes too long, the timer kills the process."""
    seconds = float(sys.argv[1])
    limit()
    for line in sys.stdin:
        set_timer(seconds)
        answer = json.dumps(lay_out(json.loads(line)))
        set_timer(0)
        print(answer, flush=True)


if __name__ == "__main__":
    main()
