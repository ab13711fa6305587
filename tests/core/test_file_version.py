"""A file's version is a whole number."""

from __future__ import annotations

from forerun.core.file_version import is_version


def test_only_a_whole_number_is_a_version():
    assert is_version(1, 1)
    assert [found for found in (True, 1.0, "1", 2, None, [1]) if is_version(found, 1)] == []
