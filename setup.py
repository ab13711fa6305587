"""Builds the native CPU kernels, one library per instruction set, and one that says which of them the processor runs.

All else is in pyproject.toml.

Where there is no compiler the package is installed without them: torch then computes. A checkout that is used where it lies
(pip install -e, build_ext --inplace) gets the levels that this machine runs well, a package all of them. FORERUN_BUILD_LEVELS
names levels to build and no others, or all, and they must be built. CFLAGS come after the flags of this file, so they win. They are built for
the system that Python says it runs on, or for the one that _PYTHON_HOST_PLATFORM names, with the compilers CC and CXX:
_PYTHON_HOST_PLATFORM=linux-aarch64 CC=aarch64-linux-gnu-gcc CXX=aarch64-linux-gnu-g++.
"""

import copy
import ctypes
import os
import platform
import shlex
import sys
import sysconfig
from pathlib import Path

if sys.platform == "darwin":  # a Python for two architectures would have each file compiled for both, with flags of one
    os.environ.setdefault("ARCHFLAGS", f"-arch {platform.machine()}")

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

SOURCES = Path("src/forerun/ops/native/csrc")
PREFIX = "forerun.ops.native.libforerun_"
PROCESSOR = "processor"
WARNINGS = ["-Wall", "-Wextra"]
FLAGS = [
    "-std=c++20",
    "-O3",
    "-g0",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-strict-aliasing",  # attention's weights take the place of its scores, and keys are read as words
    "-pthread",
    *WARNINGS,
]
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mprefer-vector-width=512"]
AVX512VNNI = [*AVX512, "-mavx512vnni"]
AVX512BF16 = [*AVX512VNNI, "-mavx512bf16"]
AVX2 = ["-mavx2", "-mfma"]
NEON = "-DFORERUN_NEON"
LEVELS_OF_MACHINES = {
    ("x86_64", "amd64"): {
        "amx": [*AVX512BF16, "-mamx-tile", "-mamx-bf16"],
        "avx512bf16": AVX512BF16,
        "avx512vnni": AVX512VNNI,
        "avx512": AVX512,
        "avxvnni": [*AVX2, "-mavxvnni"],
        "avx2": AVX2,
    },
    ("aarch64", "arm64"): {"neonbf16": [NEON, "-march=armv8.2-a+bf16+dotprod"], "neon": [NEON]},
}
# In a checkout a level is not built where the fuller one named here runs, or where it is slow, unless FORERUN_BUILD_LEVELS names it.
FULLER_LEVELS = {"avx512": "avx512vnni"}
TARGET = sysconfig.get_platform().replace("universal2", platform.machine())  # as the kernels are built, see above
LEVELS = {"portable": []}
for machine, levels in LEVELS_OF_MACHINES.items():
    if TARGET.endswith(machine):
        LEVELS = {**levels, **LEVELS}
WANTED = list(filter(None, os.environ.get("FORERUN_BUILD_LEVELS", "").split(",")))
WANTED = list(LEVELS) if WANTED == ["all"] else WANTED
if unknown := set(WANTED) - set(LEVELS):
    sys.exit(f"FORERUN_BUILD_LEVELS: got {min(unknown)!r}; for {TARGET} it may be all, or some of {', '.join(LEVELS)}")
SUFFIX = {"win32": ".dll", "darwin": ".dylib"}.get(sys.platform, ".so")


class BuildKernels(build_ext):
    """Compiles plain shared libraries, which no version of Python is bound to."""

    def initialize_options(self):
        """Compile the levels side by side."""
        super().initialize_options()
        self.parallel = True

    def run(self):
        """Compile the libraries, of a checkout those that are of use there."""
        self.is_for_checkout = self.inplace or self.editable_mode
        super().run()

    def build_extensions(self):
        """Leave out what would be compiled in vain, and remove what was compiled of it before, since it is stale."""
        if self.is_for_checkout and not WANTED:
            ask = self.ask_processor()

            def runs_well_here(level):
                return level == PROCESSOR or (ask("runs_here", level) and not ask("is_slow_here", level))

            def is_of_use(level):
                fuller = FULLER_LEVELS.get(level)
                return runs_well_here(level) and not (fuller and runs_well_here(fuller))

            for ext in [ext for ext in self.extensions if not is_of_use(level_of(ext))]:
                self.extensions.remove(ext)
                Path("src", self.get_ext_filename(ext.name)).unlink(missing_ok=True)
        super().build_extensions()

    def ask_processor(self):
        """Build the library that knows this machine's processor; return a function that asks it.

        Where it cannot be built, every level runs here, and none is slow.
        """
        libraries = self.extensions
        (processor,) = self.extensions = [ext for ext in libraries if level_of(ext) == PROCESSOR]
        super().build_extensions()  # which goes on where an optional one cannot be built
        self.extensions = libraries
        try:
            answers = ctypes.CDLL(str(Path(self.get_ext_fullpath(processor.name)).resolve()))
        except OSError:  # there is no compiler, or one for another system
            return lambda question, _: question == "runs_here"
        return lambda question, level: bool(answers[f"forerun_{question}"](level.encode()))

    def build_extension(self, ext):
        """Compile each level in a folder of its own: they share a source, so their object files share a name."""
        alone = copy.copy(self)
        alone.build_temp = str(Path(self.build_temp, ext.name))
        super(BuildKernels, alone).build_extension(ext)

    def get_ext_filename(self, fullname):
        """Leave Python's version out of the name."""
        return str(Path(*fullname.split("."))) + SUFFIX

    def get_export_symbols(self, ext):  # noqa: ARG002 - setuptools' signature
        """None beyond those that the source exports: there is no module to initialise."""
        return []


class AnyPythonWheel(bdist_wheel):
    """A wheel for this system and every Python 3: the libraries speak C, not Python."""

    def get_tag(self):
        """(python, abi, platform)"""
        return "py3", "none", super().get_tag()[2].replace("universal2", platform.machine())


def library(name, source, flags=()):
    """One of the libraries, of a source beside the headers."""
    return Extension(
        f"{PREFIX}{name}",
        sources=[str(SOURCES / source)],
        depends=[str(header) for header in sorted(SOURCES.glob("*.h"))],
        extra_compile_args=[*FLAGS, *flags, *shlex.split(os.environ.get("CFLAGS", ""))],
        extra_link_args=["-pthread"],
        language="c++",
        optional=not WANTED,
    )


def level_of(ext):
    """What `library` has named."""
    return ext.name.removeprefix(PREFIX)


# The level portable takes the compiler longest.
LONGEST_FIRST = sorted(WANTED or LEVELS, key=lambda level: level != "portable")

setup(
    ext_modules=[
        *(library(level, "cpu.cpp", LEVELS[level]) for level in LONGEST_FIRST),
        library(PROCESSOR, "processor.cpp"),
    ],
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": AnyPythonWheel},
)
