"""A program of its own that lays out conversations by chat templates: it may hang, eat memory or die without harm.

For each line of JSON that it reads, the arguments of `chat_template.render`, it writes one,
{"text": ...} or {"error": ...}. Its argument is the time for one, in seconds of CPU. It runs by its path,
and so does not import the server.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from typing import Any

from forerun.models.chat_template import render

MOST_BYTES = 2 << 30  # of address space


def lay_out(arguments: dict[str, Any]) -> dict[str, str]:
    """The conversation's text, or why there is none."""
    try:
        return {"text": render(**arguments)}
    except Exception as error:  # a template may raise whatever Python can
        said, kind = str(error), type(error).__name__
        return {"error": f"{kind}: {said}" if isinstance(error, KeyError) else said or kind}


def main() -> None:
    """Answer line by line; where a conversation takes too long, the timer kills the process."""
    seconds = float(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        answer = json.dumps(lay_out(json.loads(line)))
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(answer, flush=True)


if __name__ == "__main__":
    main()
