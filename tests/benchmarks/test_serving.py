"""What of the caller's environment a benchmark's server gets."""

from __future__ import annotations

import pytest

from benchmarks.serving import is_option


@pytest.mark.parametrize("variable", ["FORERUN_PORT", "FORERUN_API_KEY", "FORERUN_SPECULATIVE_CONFIG"])
def test_options_are_the_benchmarks_own(variable):
    assert is_option(variable)


@pytest.mark.parametrize("variable", ["FORERUN_CACHE", "FORERUN_CPU_KERNELS", "FORERUN_PACKED_CACHE_GB", "PATH"])
def test_folders_kernels_and_caches_are_the_callers(variable):
    assert not is_option(variable)
