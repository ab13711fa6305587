"""Memory for weights: side by side, apart from each other, alive as long as it is used."""

from __future__ import annotations

import gc
import mmap
import sys
from pathlib import Path

import pytest
import torch

from forerun.ops.native import memory
from forerun.ops.native.memory import HUGE_PAGE, READ_AT_ONCE, Arena, map_or_read


def test_tensors_do_not_overlap():
    arena = Arena()
    tensors = [arena.empty((rows, 3), torch.float32).fill_(rows) for rows in range(1, 40)]
    assert all(tensor.eq(rows).all() for rows, tensor in enumerate(tensors, start=1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_tensors_begin_at_cache_lines(dtype):
    arena = Arena()
    tensors = [arena.empty((5, 7), dtype) for _ in range(10)]
    assert {(tensor.data_ptr() % 64, tensor.shape, tensor.dtype) for tensor in tensors} == {(0, (5, 7), dtype)}


def test_tensors_larger_than_a_chunk_are_given():
    arena = Arena()
    first, large, last = (arena.empty((size,), torch.int8) for size in (10, memory.CHUNK + 1, 10))
    assert len(large) == memory.CHUNK + 1
    assert len({tensor.data_ptr() for tensor in (first, large, last)}) == 3


def test_a_tensor_outlives_its_arena():
    tensor = Arena().empty((1000,), torch.float32).fill_(7)
    gc.collect()
    assert tensor.eq(7).all()


@pytest.mark.parametrize("is_copied", [False, True])
@pytest.mark.parametrize("size", [1, READ_AT_ONCE, READ_AT_ONCE + 4097])
def test_a_file_is_mapped_or_copied_whole(is_copied, size, tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "_gives_huge_pages", lambda: is_copied)
    monkeypatch.setattr(memory, "_is_in_huge_pages", lambda mapped, address: False)
    content = torch.arange(size, dtype=torch.int64).mul_(2654435761).view(torch.uint8)[::8].contiguous()
    (tmp_path / "file").write_bytes(content.numpy().tobytes())
    with (tmp_path / "file").open("rb") as stream:
        found = map_or_read(stream)
    assert torch.equal(found, content)
    assert found.data_ptr() % 64 == 0


@pytest.mark.parametrize(("is_copied", "expected"), [(False, []), (True, ["waited", "copied"])])
def test_a_copy_alone_waits_for_memory_to_become_free(is_copied, expected, tmp_path, monkeypatch):
    done = []
    monkeypatch.setattr(memory, "_gives_huge_pages", lambda: is_copied)
    monkeypatch.setattr(memory, "_is_in_huge_pages", lambda mapped, address: False)
    monkeypatch.setattr(memory, "_copy", lambda file, size: done.append("copied"))
    (tmp_path / "file").write_bytes(bytes(10))
    with (tmp_path / "file").open("rb") as stream:
        map_or_read(stream, before_copying=lambda: done.append("waited"))
    assert done == expected


@pytest.mark.skipif(sys.platform != "linux", reason="Linux says how memory is mapped")
def test_small_pages_are_told_from_huge_ones(tmp_path):
    (tmp_path / "file").write_bytes(bytes(1000))
    with (tmp_path / "file").open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert not memory._is_in_huge_pages(mapped, torch.frombuffer(bytearray(1), dtype=torch.uint8).data_ptr())


@pytest.mark.skipif(sys.platform != "linux", reason="Linux says how memory is mapped")
def test_a_file_that_was_asked_for_counts_as_memory_only_when_it_is_used(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "ASKED_AT_ONCE", 4 * HUGE_PAGE)
    size = 9 * HUGE_PAGE
    (tmp_path / "file").write_bytes(bytes(size))
    with (tmp_path / "file").open("rb") as stream:
        mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        whole = memory._read_only(mapped)
        memory._is_in_huge_pages(mapped, whole.data_ptr())
        assert resident(whole.data_ptr()) <= 3 * HUGE_PAGE
        assert not whole.any()
        assert resident(whole.data_ptr()) == size


def resident(address):
    """Bytes in memory of what is mapped from here on."""
    areas = Path("/proc/self/smaps").read_text().split(f"\n{address:x}-")[1].splitlines()
    return next(int(line.split()[1]) << 10 for line in areas if line.startswith("Rss:"))
