"""A program that checks in a process of its own whether a grammar compiles: it may hang, eat memory or die.

It reads {"grammar": text, "limits": {...}} from standard input and writes what is wrong with the
grammar, nothing if it is good. It runs by its path and imports nothing of the package.
"""

from __future__ import annotations

import json
import sys
import threading
from contextlib import suppress

from llguidance import LLMatcher, LLParserLimits

CPU_SECONDS = 5
MEMORY_BYTES = 2 << 30  # of address space
STACK_BYTES = 4 << 20  # half of what the threads have that compile the grammars that pass


def validate() -> str:
    """llguidance's complaint about the grammar on standard input; empty if it is good."""
    given = json.load(sys.stdin)
    return LLMatcher.validate_grammar(given["grammar"], limits=LLParserLimits(**given["limits"]))


def limit_resources() -> None:
    """Limit CPU time and memory where the system can; the caller's timeout holds everywhere."""
    try:
        import resource
    except ImportError:  # Windows
        return
    for kind, most in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, CPU_SECONDS),
        (resource.RLIMIT_AS, MEMORY_BYTES),
    ):
        _, hard = resource.getrlimit(kind)
        limit = most if hard == resource.RLIM_INFINITY else min(most, hard)
        with suppress(OSError, ValueError):  # macOS may refuse a limit of address space
            resource.setrlimit(kind, (limit, limit))


def main() -> None:
    """Write the complaint, found on a small stack and under limits; a grammar that cannot be judged to the end is not good."""
    limit_resources()
    threading.stack_size(STACK_BYTES)
    complaints: list[str] = []
    thread = threading.Thread(target=lambda: complaints.append(validate()))
    thread.start()
    thread.join()
    if not complaints:
        sys.exit(1)  # the thread has said why
    sys.stdout.buffer.write(complaints[0].encode())


if __name__ == "__main__":
    main()
