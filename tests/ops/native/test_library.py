"""Which build of the kernels is taken, that a stale one is not, and what comes of calls that cannot be computed."""

from __future__ import annotations

import _ctypes
import ctypes
import multiprocessing
import os
import platform
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from forerun.errors import ConfigError
from forerun.ops.native import library
from forerun.ops.native.library import KERNELS_VARIABLE, LEVELS, kernels_of_level, library_file, load_kernels
from tests.native import (
    BF16,
    BF16_CODED,
    EMULATED,
    FP32,
    INT8,
    KERNELS,
    SANITIZED,
    every_level,
    needs_kernels,
    packed_linear,
    threads,
)

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def no_variable(monkeypatch):
    monkeypatch.delenv(KERNELS_VARIABLE, raising=False)


# --- which build ----------------------------------------------------------------------------------


SAY_WHAT_IS_BUILT = """
import runpy, setuptools
given = {}
setuptools.setup = lambda **named: given.update(named)
runpy.run_path("setup.py")
wheel = given["cmdclass"]["bdist_wheel"](setuptools.Distribution({"ext_modules": given["ext_modules"]}))
wheel.ensure_finalized()
print(*(library.name for library in given["ext_modules"]), *wheel.get_tag())
"""


def test_a_python_for_two_architectures_builds_the_kernels_and_the_wheel_of_the_one_that_it_runs_on():
    for_two, for_one = (
        subprocess.check_output(
            [sys.executable, "-c", SAY_WHAT_IS_BUILT],
            cwd=ROOT,
            env={**os.environ, "_PYTHON_HOST_PLATFORM": f"macosx-11.0-{machine}", "FORERUN_BUILD_LEVELS": ""},
            text=True,
            timeout=60,
        )
        for machine in ("universal2", platform.machine())
    )
    assert for_two == for_one
    assert for_two.endswith(f"py3 none macosx_11_0_{platform.machine()}\n")


SAY_WHAT_IS_COMPILED = """
import runpy, setuptools, sys
given = {}
setuptools.setup = lambda **named: given.update(named)
runpy.run_path(sys.argv[1])
Build = given["cmdclass"]["build_ext"]
answers = {"runs_here": ("portable", "avx512bf16"), "is_slow_here": ("avx512bf16",)}
Build.ask_processor = lambda self: lambda question, level: level in answers[question]
Build.build_extension = lambda self, ext: sys.stdout.write(ext.name + chr(10))
Build.copy_extensions_to_source = lambda self: None
build = Build(setuptools.Distribution({"ext_modules": given["ext_modules"]}))
build.inplace = sys.argv[2] == "checkout"
build.ensure_finalized()
build.run()
"""


def test_a_checkout_gets_the_levels_that_run_well_here_and_keeps_no_stale_ones(tmp_path):
    def compiled(use, wanted):
        words = subprocess.check_output(
            [sys.executable, "-c", SAY_WHAT_IS_COMPILED, str(ROOT / "setup.py"), use],
            cwd=tmp_path,
            env={**os.environ, "FORERUN_BUILD_LEVELS": wanted},
            text=True,
            timeout=60,
        ).split()
        return {word.removeprefix("forerun.ops.native.libforerun_") for word in words}

    folder = tmp_path / "src/forerun/ops/native"
    folder.mkdir(parents=True)
    for level in LEVELS:
        (folder / library_file(level).name).touch()
    everything, useful = compiled("package", ""), {"portable", "processor"}
    assert compiled("checkout", "all") == everything > useful
    assert all((folder / library_file(level).name).exists() for level in LEVELS)
    assert compiled("checkout", "") == useful
    left = {level for level in LEVELS if (folder / library_file(level).name).exists()}
    assert left == set(LEVELS) - (everything - useful)


def test_a_checkout_is_built_without_kernels_where_there_is_no_compiler(tmp_path):
    command = [sys.executable, str(ROOT / "setup.py"), "build_ext", "--inplace"]
    environment = {**os.environ, "CC": "false", "CXX": "false", "FORERUN_BUILD_LEVELS": ""}
    subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, check=True, timeout=60)
    assert not list(tmp_path.rglob("libforerun_*"))


@needs_kernels
def test_the_best_build_that_runs_here_is_reserved():
    assert load_kernels() is KERNELS[min(KERNELS, key=lambda level: (level == "portable", library.is_slow_here(level)))]


@pytest.mark.parametrize("level", KERNELS)
def test_the_environment_may_name_a_level(monkeypatch, level):
    monkeypatch.setenv(KERNELS_VARIABLE, level)
    assert load_kernels() is KERNELS[level]


def test_the_environment_may_turn_them_off(monkeypatch):
    monkeypatch.setenv(KERNELS_VARIABLE, "off")
    assert load_kernels() is None


@pytest.mark.parametrize(
    ("built", "taken"),
    [
        (["avx512bf16", "avx512vnni", "avx2", "portable"], "avx512vnni"),
        (["avx512bf16", "avx2", "portable"], "avx2"),
        (["avx512bf16", "portable"], "avx512bf16"),
        (["avx512bf16"], "avx512bf16"),
        (["portable"], "portable"),
    ],
)
def test_a_level_that_is_slow_here_comes_last_but_for_the_portable_one(monkeypatch, built, taken):
    monkeypatch.setattr(library, "is_slow_here", lambda level: level == "avx512bf16")
    monkeypatch.setattr(
        library, "kernels_of_level", lambda level: SimpleNamespace(level=level) if level in built else None
    )
    assert library.best_kernels().level == taken
    monkeypatch.setenv(KERNELS_VARIABLE, built[0])
    assert library.best_kernels().level == built[0]


@pytest.mark.skipif(EMULATED or not Path("/proc/cpuinfo").exists(), reason="the system does not name its processor")
@needs_kernels
def test_instructions_for_bf16_are_slow_on_intels_processors_alone():
    is_intel = "GenuineIntel" in Path("/proc/cpuinfo").read_text()
    assert {level for level in LEVELS if library._ask_processor("is_slow_here", level)} == (
        {"avx512bf16"} if is_intel else set()
    )


@pytest.mark.parametrize("level", ["avx1024", "", "OFF"])
def test_an_unknown_level_is_refused_with_those_there_are(monkeypatch, level):
    monkeypatch.setenv(KERNELS_VARIABLE, level)
    with pytest.raises(
        ConfigError, match=f"{KERNELS_VARIABLE}: got '{level}'; may be off, amx, avx512bf16, avx512vnni, .*portable"
    ):
        load_kernels()


@pytest.mark.parametrize("level", LEVELS)
def test_a_level_that_is_not_here_is_refused_when_asked_for(monkeypatch, level):
    monkeypatch.setenv(KERNELS_VARIABLE, level)
    monkeypatch.setattr(library, "kernels_of_level", lambda level: None)
    with pytest.raises(ConfigError, match=f"'{level}' is not built or not for this CPU"):
        load_kernels()


def test_where_nothing_is_built_there_are_none(monkeypatch, tmp_path):
    monkeypatch.setattr(library, "library_file", lambda level: tmp_path / library_file(level).name)
    monkeypatch.setattr(library, "kernels_of_level", kernels_of_level.__wrapped__)
    assert load_kernels() is None


@every_level
def test_each_file_holds_the_level_of_its_name(kernels):
    library = ctypes.CDLL(str(library_file(kernels.level)))
    library.forerun_level.restype = ctypes.c_char_p
    assert library.forerun_level() == kernels.level.encode()


@pytest.fixture
def any_level_runs(monkeypatch):
    """As on a CPU that has all instructions."""
    monkeypatch.setattr(library, "runs_here", lambda level: True)


def test_a_level_that_this_cpu_does_not_run_is_not_even_loaded(monkeypatch, tmp_path):
    monkeypatch.setattr(library, "library_file", lambda name: tmp_path / library_file(name).name)
    for level in LEVELS:
        library.library_file(level).write_bytes(b"no library")  # to load it would raise
    monkeypatch.setattr(library, "runs_here", lambda level: False)
    monkeypatch.setattr(library, "is_slow_here", lambda level: False)
    monkeypatch.setattr(library, "kernels_of_level", kernels_of_level.__wrapped__)
    assert load_kernels() is None


@needs_kernels
def test_portable_runs_on_every_cpu_and_a_level_without_a_name_on_none():
    assert library.runs_here("portable")
    assert not library.runs_here("avx1024")


@pytest.mark.skipif(EMULATED or not Path("/proc/cpuinfo").exists(), reason="the system does not list its instructions")
@needs_kernels
@pytest.mark.parametrize(
    ("level", "flags"),
    [
        ("neonbf16", {"bf16", "asimddp"}),
        ("avx2", {"avx2", "fma"}),
        ("avxvnni", {"avx2", "fma", "avx_vnni"}),
        ("avx512", {"avx512f", "avx512bw", "avx512vl", "avx512dq"}),
        ("avx512vnni", {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"}),
        ("avx512bf16", {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "avx512_vnni"}),
    ],
)
def test_a_level_runs_where_the_system_lists_its_instructions(level, flags):
    listed = next(
        (line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith(("flags", "Features"))), ""
    )
    assert library.runs_here(level) == (flags <= set(listed.split()))


@needs_kernels
def test_without_the_library_that_knows_the_processor_no_level_is_loaded(monkeypatch, tmp_path, level):
    files = {"processor": tmp_path / "libforerun_processor.so"}
    monkeypatch.setattr(library, "library_file", lambda name: files.get(name, library_file(name)))
    with pytest.raises(ConfigError, match=r"libforerun_processor.so cannot be used .*; reinstall forerun, or set"):
        kernels_of_level.__wrapped__(level)


@pytest.mark.skipif(not library_file("portable").exists(), reason="the level portable is not built")
@pytest.mark.usefixtures("any_level_runs")
def test_a_file_of_another_level_is_refused(monkeypatch):
    monkeypatch.setattr(library, "library_file", lambda _: library_file("portable"))
    with pytest.raises(
        ConfigError, match=r"native CPU kernels: libforerun_portable.*it was built for portable\); reinstall"
    ):
        kernels_of_level.__wrapped__("avx2")


@pytest.mark.usefixtures("any_level_runs")
def test_a_damaged_file_is_refused(monkeypatch, tmp_path):
    damaged = tmp_path / "libforerun_avx2.so"
    damaged.write_bytes(b"no library")
    monkeypatch.setattr(library, "library_file", lambda _: damaged)
    with pytest.raises(ConfigError, match=r"libforerun_avx2.so cannot be used .*; reinstall forerun, or set"):
        kernels_of_level.__wrapped__("avx2")


@pytest.fixture
def level():
    """One that is built."""
    return next(iter(KERNELS))


@needs_kernels
def test_a_library_of_another_version_is_refused(monkeypatch, level):
    built = library.INTERFACE_VERSION
    monkeypatch.setattr(library, "INTERFACE_VERSION", 0)
    with pytest.raises(
        ConfigError, match=rf"cannot be used \(its interface is of version {built}, not 0\); reinstall forerun"
    ):
        kernels_of_level.__wrapped__(level)


@pytest.mark.usefixtures("any_level_runs")
def test_a_library_from_before_there_were_versions_is_refused(monkeypatch):
    monkeypatch.setattr(library, "library_file", lambda _: Path(_ctypes.__file__))  # any library that is not ours
    with pytest.raises(
        ConfigError,
        match=rf"cannot be used \(its interface is of version 0, not {library.INTERFACE_VERSION}\); reinstall forerun",
    ):
        kernels_of_level.__wrapped__("avx2")


@needs_kernels
@pytest.mark.parametrize("name", library.STRUCT_SIZES)
def test_a_library_whose_structures_have_other_sizes_is_refused(monkeypatch, level, name):
    size = library.STRUCT_SIZES[name]
    monkeypatch.setitem(library.STRUCT_SIZES, name, size + 8)
    with pytest.raises(ConfigError, match=rf"\(its {name} has {size} bytes, not {size + 8}\); reinstall forerun"):
        kernels_of_level.__wrapped__(level)


@needs_kernels
def test_a_structure_that_the_library_does_not_know_is_refused(monkeypatch, level):
    monkeypatch.setitem(library.STRUCT_SIZES, "Expert", 8)
    with pytest.raises(ConfigError, match=r"\(its Expert has -1 bytes, not 8\)"):
        kernels_of_level.__wrapped__(level)


@needs_kernels
def test_a_build_for_another_cpu_is_passed_over(monkeypatch):
    best, *others = LEVELS
    monkeypatch.setattr(library, "is_slow_here", lambda level: False)
    monkeypatch.setattr(library, "kernels_of_level", lambda level: None if level == best else KERNELS.get(level))
    found = load_kernels()
    assert found is next((KERNELS[level] for level in others if level in KERNELS), None)


@needs_kernels
def test_as_many_threads_are_taken_as_torch_has():
    torch.set_num_threads(2)
    try:
        assert load_kernels().num_threads == 2
    finally:
        torch.set_num_threads(1)
        assert load_kernels().num_threads == 1


def test_where_nothing_is_built_one_warning_says_what_is_lost(caplog, monkeypatch, tmp_path):
    monkeypatch.setattr(library, "library_file", lambda level: tmp_path / library_file(level).name)
    library.warn_if_not_built.cache_clear()
    library.warn_if_not_built()
    library.warn_if_not_built()
    (record,) = caplog.records
    assert "decoding is slower, and in bf16 speculated text may differ" in record.message
    library.warn_if_not_built.cache_clear()


@needs_kernels
def test_kernels_that_are_only_turned_off_are_not_missed(caplog, monkeypatch):
    monkeypatch.setenv(KERNELS_VARIABLE, "off")
    library.warn_if_not_built.cache_clear()
    library.warn_if_not_built()
    assert not caplog.records


# --- calls that cannot be computed ---------------------------------------------------------------


def weight_of(kernels, *, outputs=64, inputs=30, weight_format=BF16):
    return packed_linear(kernels, torch.randn(outputs, inputs), weight_format=weight_format).weight


def call_linear(kernels, struct, *, num_rows=1, width=30, num_outputs=64):
    """`forerun_linear` on one row of zeros, whatever the sizes say."""
    row, out = torch.zeros(30), torch.zeros(64)
    kernels.linear(*(struct, row.data_ptr(), num_rows, width, num_outputs, 1.0, 0.0, out.data_ptr(), 0, None, None))


@every_level
@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"width": 32}, "the rows are wider than the weight's inputs"),
        ({"width": -1}, "the width of a row is out of range"),
        ({"num_rows": -1}, "the number of rows is out of range"),
        ({"num_rows": 1 << 40}, "the number of rows is out of range"),
        ({"num_outputs": 65}, "more outputs are asked for than the weight has"),
    ],
)
def test_a_product_of_sizes_that_do_not_fit_is_refused(kernels, sizes, message):
    with pytest.raises(ValueError, match=f"native CPU kernels: linear: {message}"):
        call_linear(kernels, weight_of(kernels).struct, **sizes)


@every_level
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"storage": 9}, "the weight's storage is unknown"),
        ({"outputs": 33}, "the weight's outputs are not whole tiles"),
        ({"inputs": 29}, "the weight's inputs are not even"),
        ({"inputs": 0}, "the weight has no inputs"),
        ({"storage": INT8.kernel_id}, "the int8 weight has no scale"),
        ({"storage": BF16_CODED.kernel_id}, "the coded weight has no list of rare weights"),
    ],
)
def test_a_weight_that_does_not_hold_together_is_refused(kernels, fields, message):
    weight = weight_of(kernels)
    for name, value in fields.items():
        setattr(weight.struct, name, value)
    with pytest.raises(ValueError, match=message):
        call_linear(kernels, weight.struct)


@every_level
@pytest.mark.parametrize("token_id", [-1, 64])
def test_an_output_that_a_weight_does_not_have_is_not_read(kernels, token_id):
    linear = packed_linear(kernels, torch.randn(45, 30), weight_format=BF16)
    with pytest.raises(ValueError, match="an output is asked for that the weight does not have"):
        linear.rows(torch.tensor([0, token_id]))


@every_level
@pytest.mark.skipif(SANITIZED, reason="the sanitizer ends a process that asks for so much")
def test_a_call_without_memory_enough_raises_and_the_next_one_computes(kernels):
    linear = packed_linear(kernels, torch.randn(64, 2), weight_format=FP32)  # which takes memory for the rows alone
    huge = type(linear.weight.struct).from_buffer_copy(linear.weight.struct)
    huge.inputs = 1 << 28
    with pytest.raises(MemoryError, match="native CPU kernels: linear: there is not memory enough"):
        call_linear(kernels, huge, num_rows=1 << 28, width=2)
    assert torch.equal(linear(torch.zeros(1, 2)), torch.zeros(1, 64))


def start_threads_in_child(kernels, linear):
    """Exits with 0 if a call whose threads cannot be started raises, and computes as soon as they can."""
    import resource

    kernels.use_threads(200)  # they are started by the first call
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + (64 << 20), resource.RLIM_INFINITY))
    with pytest.raises(ConfigError, match="the system starts no more threads; lower OMP_NUM_THREADS"):
        linear(torch.zeros(1, 30))
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    linear(torch.zeros(1, 30))
    os._exit(0)


@every_level
@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory as Linux has them")
@pytest.mark.skipif(SANITIZED, reason="the sanitizer takes more addresses than the limit leaves")
@pytest.mark.skipif(EMULATED, reason="the emulator does not keep such limits")
def test_where_the_system_starts_no_more_threads_a_call_raises_and_a_later_one_computes(kernels):
    linear = packed_linear(kernels, torch.randn(64, 30), weight_format=BF16)
    child = multiprocessing.get_context("fork").Process(target=start_threads_in_child, args=(kernels, linear))
    child.start()
    child.join(60)
    assert child.exitcode == 0


@every_level
@pytest.mark.parametrize("num_threads", [0, -1, 5000])
def test_a_team_of_no_threads_or_of_thousands_is_refused(kernels, num_threads):
    before = kernels.num_threads
    with pytest.raises(ValueError, match="the number of threads must be from 1 to 4096"):
        kernels._set_threads(num_threads, None)
    assert kernels.num_threads == before


@every_level
def test_memory_can_be_read_by_all_threads(kernels):
    buffer = torch.zeros(70, dtype=torch.int64)
    buffer[33], buffer[69] = 5, 8
    with threads(kernels, 2):
        assert kernels.read(buffer) == 13  # the exclusive or of all words
