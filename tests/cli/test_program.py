"""The program as a process: how it ends, and its streams."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import atexit, sys, threading, time
from forerun.cli import app
from forerun.cli.program import program

def work(argv=None):
    threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
    atexit.register(print, "exit function")
    print("command")
    {end}

app.main = work
program()
"""


@pytest.mark.parametrize(("end", "code"), [("return 2", 2), ("raise RuntimeError('a bug')", 1), ("return 0", 0)])
def test_program_ends_with_the_code_of_its_command_after_threads_and_exit_functions(end: str, code: int) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(end=end)], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == code
    assert ended.stdout.split("\n") == ["command", "thread", "exit function", ""]
    assert ("a bug" in ended.stderr) == ("RuntimeError" in end)


IMPORTING = """
import signal, sys
from importlib.abc import MetaPathFinder
from forerun.cli.program import program

class CtrlC(MetaPathFinder):
    def find_spec(self, name, *_):
        if name == "forerun.cli.app":
            signal.raise_signal(signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)  # which is not there for what runs in a shell's background
sys.meta_path.insert(0, CtrlC())
program()
"""


def test_ctrl_c_while_a_command_is_being_imported_ends_it_without_a_traceback() -> None:
    ended = subprocess.run([sys.executable, "-c", IMPORTING], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


STREAMS = """
import sys
from forerun.cli import app
from forerun.cli.program import program

def work(argv=None):
    print(ascii(sys.stdin.read()), "é")
    print("é", file=sys.stderr)
    return 0

app.main = work
program()
"""


def test_a_character_that_a_stream_lacks_is_replaced() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", STREAMS],
        input="ü".encode(),
        capture_output=True,
        timeout=60,
        check=True,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
    )
    assert ended.stdout.split() == [rb"'\udcc3\udcbc'", b"?"]
    assert ended.stderr.split() == [rb"\xe9"]


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_stream_that_is_closed_leads_nowhere(closed: str) -> None:
    command = ["sh", "-c", f'"$0" -c "$1" {closed}', sys.executable, STREAMS]
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout == ("" if ">&- " in f"{closed} ".replace("2>&- ", "") else "'' é\n")
    assert ended.stderr == ("" if "2>&-" in closed else "é\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux")
def test_output_that_cannot_take_more_is_one_line() -> None:
    code = "import sys; from forerun.cli.program import program; sys.argv[1:] = ['drafters']; program()"
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    assert (ended.returncode, ended.stderr) == (2, "error: No space left on device\n")
