"""Builds the native CPU kernels, one library per instruction set; all else is in pyproject.toml.

Where there is no compiler the package is installed without them: torch then computes. FORERUN_BUILD_LEVELS names levels to
build and no others, and they must be built. CFLAGS come after the flags of this file, so they win.
"""

import copy
import os
import platform
import shlex
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

SOURCES = Path("src/forerun/ops/native/csrc")
PACKAGE = "forerun.ops.native"
WARNINGS = ["-Wall", "-Wextra"]
FLAGS = [
    "-std=c++20",
    "-O3",
    "-g0",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-pthread",
    *WARNINGS,
]
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mprefer-vector-width=512"]
X86_LEVELS = {"avx512bf16": [*AVX512, "-mavx512bf16"], "avx512": AVX512, "avx2": ["-mavx2", "-mfma"]}
IS_X86 = platform.machine().lower() in ("x86_64", "amd64")
LEVELS = {**(X86_LEVELS if IS_X86 else {}), "portable": []}
WANTED = list(filter(None, os.environ.get("FORERUN_BUILD_LEVELS", "").split(",")))
if unknown := set(WANTED) - set(LEVELS):
    sys.exit(f"FORERUN_BUILD_LEVELS: got {min(unknown)!r}; may be {', '.join(LEVELS)}, separated by commas")
SUFFIX = {"win32": ".dll", "darwin": ".dylib"}.get(sys.platform, ".so")


class BuildKernels(build_ext):
    """Compiles plain shared libraries, which no version of Python is bound to."""

    def initialize_options(self):
        """Compile the levels side by side."""
        super().initialize_options()
        self.parallel = True

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
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[
        Extension(
            f"{PACKAGE}.libforerun_{level}",
            sources=[str(SOURCES / "cpu.cpp")],
            depends=[str(header) for header in sorted(SOURCES.glob("*.h"))],
            extra_compile_args=[*FLAGS, *LEVELS[level], *shlex.split(os.environ.get("CFLAGS", ""))],
            extra_link_args=["-pthread"],
            language="c++",
            optional=not WANTED,
        )
        for level in WANTED or LEVELS
    ],
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": AnyPythonWheel},
)
