"""A program of its own that tries whether a grammar compiles: it may hang, eat memory or die without harm.

Reads {"grammar": text, "limits": {...}} and writes what is wrong with the grammar, nothing if it is good.
It runs by its path and so imports nothing of the package.
"""

from __future__ import annotations

import json
import resource
import sys
import threading

from llguidance import LLMatcher, LLParserLimits

MOST_SECONDS = 5  # of CPU
MOST_BYTES = 2 << 30  # of address space
STACK_BYTES = 4 << 20  # half of what the threads have that compile what was good


def validate() -> None:
    """Write llguidance's complaint about the grammar on standard input."""
    given = json.load(sys.stdin)
    sys.stdout.write(LLMatcher.validate_grammar(given["grammar"], limits=LLParserLimits(**given["limits"])))


def main() -> None:
    """Validate on a small stack and under limits."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (MOST_SECONDS, MOST_SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=validate)
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
