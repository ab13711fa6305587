"""The sandbox says what is wrong with a grammar, within its limits, on systems without POSIX limits too."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytest.importorskip("llguidance")

from forerun.grammar import sandbox
from forerun.grammar.compiler import MATCHER_LIMITS

WITHOUT_POSIX = "import runpy, sys; sys.modules['resource'] = None; runpy.run_path(sys.argv[1], run_name='__main__')"
REFUSING = """
import resource, runpy, sys
def refuse(kind, limits):
    raise ValueError("current limit exceeds maximum limit")
resource.setrlimit = refuse
runpy.run_path(sys.argv[1], run_name="__main__")
"""
LIMITED = "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30)); runpy.run_path(sys.argv[1], run_name='__main__')"


def complaint(program, regex):
    """What the sandbox, begun by a program, says of a regex."""
    given = json.dumps(
        {"grammar": json.dumps({"grammars": [{"lark_grammar": f"start: /{regex}/"}]}), "limits": MATCHER_LIMITS}
    )
    begun = [sys.executable, "-P", *program]
    return subprocess.run([*begun, sandbox.__file__], input=given, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    "program",
    [[], ["-c", WITHOUT_POSIX], ["-c", REFUSING], ["-c", LIMITED]],
    ids=["alone", "no POSIX limits", "limits refused", "lower limits in force"],
)
def test_grammars_are_judged_on_every_system(program):
    assert complaint(program, "a+") == ""
    assert "unclosed group" in complaint(program, "(a")


BROKEN = """
import runpy, sys, llguidance
def fail(grammar, limits):
    raise MemoryError
llguidance.LLMatcher.validate_grammar = staticmethod(fail)
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def test_a_grammar_that_is_not_judged_to_the_end_is_not_good():
    with pytest.raises(subprocess.CalledProcessError):
        complaint(["-c", BROKEN], "a+")
