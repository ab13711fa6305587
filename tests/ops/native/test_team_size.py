"""How many threads of a team take part: the policy of csrc/team.h alone, fed with runs of made-up lengths."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

import forerun.ops.native as native

SOURCES = Path(native.__file__).parent / "csrc"

PROGRAM = """
#include <cstdio>
#include <cstdlib>
#include "team.h"

// Reads lines of a number of runs, and of each the milliseconds that it takes and those that its members sleep; prints
// how many members the run after each line has.
int main(int, char** words) {
    forerun::TeamSize team_size(std::atoi(words[1]));
    forerun::Nanoseconds now = 0;
    int runs;
    double taken, slept;
    while (std::scanf("%d %lf %lf", &runs, &taken, &slept) == 3) {
        for (int i = 0; i < runs; ++i) {
            const int members = team_size.at(now);
            now += taken * 1e6;
            team_size.note(members, taken * 1e6, slept * 1e6, now);
        }
        std::printf("%d ", team_size.at(now));
    }
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    folder = tmp_path_factory.mktemp("team")
    source, found = folder / "team.cpp", folder / "team"
    source.write_text(PROGRAM)
    subprocess.run([compiler, "-std=c++20", "-pthread", f"-I{SOURCES}", source, "-o", found], check=True)
    return found


def sizes(program, most, *lines):
    """The number of members after each of the lines (runs, milliseconds of each, and those that its members sleep)."""
    text = "\n".join(" ".join(map(str, line)) for line in lines)
    ran = subprocess.run([program, str(most)], input=text, capture_output=True, text=True, check=True)
    return [int(word) for word in ran.stdout.split()]


def test_a_member_that_is_stopped_now_and_then_goes_on_taking_part(program):
    stopped_now_and_then = [(8, 6.0, 0.0), (1, 4.2, 3.8)] * 50
    assert set(sizes(program, 2, *stopped_now_and_then)) == {2}


def test_a_team_whose_members_sleep_most_of_the_time_goes_on_with_one_less_for_a_while(program):
    assert sizes(program, 2, (10, 6.0, 5.0), (100, 6.0, 0.0), (100, 6.0, 0.0)) == [1, 1, 2]


def test_one_pass_that_is_stopped_all_the_time_is_enough(program):
    assert sizes(program, 2, (1, 600.0, 550.0)) == [1]


def test_a_team_loses_members_until_the_rest_are_not_stopped(program):
    assert sizes(program, 4, (1, 60.0, 90.0), (1, 60.0, 60.0), (10, 60.0, 0.0), (20, 60.0, 0.0)) == [3, 2, 2, 4]


def test_a_member_is_left_out_for_five_seconds_at_most(program):
    assert sizes(program, 2, (1, 9000.0, 9000.0), (49, 100.0, 0.0), (2, 100.0, 0.0)) == [1, 1, 2]
