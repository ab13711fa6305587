"""Files of packed weights: what is written is read back to the bit, and a damaged file is never taken for a whole one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forerun.models.packed_file import PackedFile, PackedFileError, PackedFileWriter, read_table
from forerun.ops.native.formats.base import PackedWeight
from forerun.ops.native.layers import PackedLinear
from forerun.ops.native.memory import HUGE_PAGE, Arena
from tests.native import FP32, KERNELS, every_format, generator, needs_kernels


def write(path, weights, about=None):
    with path.open("wb") as stream:
        writer = PackedFileWriter(stream)
        for name, weight in weights.items():
            writer.add(name, weight)
        writer.finish(about or {})
    return path


def plain(outputs=64, inputs=8, *, seed=0):
    """A weight that needs no kernels to be packed."""
    data = torch.randn(outputs // 32, inputs, 32, generator=generator(seed))
    return PackedWeight(format=FP32, data=data, outputs=outputs, inputs=inputs)


@needs_kernels
@every_format
@pytest.mark.parametrize("shape", [(70, 18), (32, 2)])
def test_every_format_computes_the_same_from_a_file(weight_format, shape, tmp_path):
    kernels = next(iter(KERNELS.values()))
    weight = torch.randn(shape, generator=generator(1)).to(weight_format.activations)
    bias = torch.randn(shape[0], generator=generator(2))
    packed = {
        "with a bias": weight_format.pack(kernels, weight, bias, Arena()),
        "without": weight_format.pack(kernels, weight, None, Arena()),
    }
    file = PackedFile(write(tmp_path / "file", packed))
    x = torch.randn(3, shape[1], generator=generator(3))
    for name, before in packed.items():
        found = file[name]
        assert (found.format, found.outputs, found.inputs) == (before.format, *shape)
        assert torch.equal(PackedLinear(kernels, found)(x), PackedLinear(kernels, before)(x))
        assert found.num_bytes == before.num_bytes


def test_tensors_lie_at_cache_lines(tmp_path):
    weights = {str(inputs): plain(inputs=inputs) for inputs in (1, 3, 7)}
    file = PackedFile(write(tmp_path / "file", weights))
    assert [file[name].data.data_ptr() % 64 for name in weights] == [0, 0, 0]


def test_weights_larger_than_a_page_are_written_whole(tmp_path):
    weights = {"a": plain(seed=1), "b": plain(32, HUGE_PAGE // 64, seed=2), "c": plain(seed=3)}
    file = PackedFile(write(tmp_path / "file", weights))
    assert all(torch.equal(file[name].data, weight.data) for name, weight in weights.items())


def test_weights_outlive_the_file_object_and_its_name(tmp_path):
    path = write(tmp_path / "file", {"w": plain()})
    weight = PackedFile(path)["w"]
    path.unlink()
    assert torch.equal(weight.data, plain().data)


def test_what_a_file_is_about_is_in_its_table(tmp_path):
    assert read_table(write(tmp_path / "file", {"w": plain()}, {"key": [1, "a"]}))["about"] == {"key": [1, "a"]}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return write(tmp_path_factory.mktemp("whole") / "file", {"w": plain()}).read_bytes()


@given(data=st.data())
def test_a_file_that_was_cut_off_is_refused(whole, tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "cut"
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(PackedFileError):
        PackedFile(path)


@given(data=st.data())
def test_a_table_with_another_byte_is_refused(whole, tmp_path_factory, data):
    table = plain().data.nbytes  # where it begins
    place = data.draw(st.integers(table, len(whole) - 1))
    damaged = bytearray(whole)
    damaged[place] ^= data.draw(st.integers(1, 255))
    path = tmp_path_factory.getbasetemp() / "damaged"
    path.write_bytes(damaged)
    with pytest.raises(PackedFileError):
        PackedFile(path)


def test_any_other_file_is_refused(tmp_path):
    path = tmp_path / "file"
    for content in (b"", b"x" * 10, b"x" * 1000):
        path.write_bytes(content)
        with pytest.raises(PackedFileError):
            read_table(path)


def test_a_tensor_that_is_no_weight_comes_back_too(tmp_path):
    pairs = torch.arange(6, dtype=torch.int32).view(3, 2)
    file = PackedFile(write(tmp_path / "file", {"w": plain(), "pairs": pairs, "none": pairs[:0]}))
    assert torch.equal(file.tensor("pairs"), pairs)
    assert file.tensor("none").shape == (0, 2)
    assert torch.equal(file["w"].data, plain().data)
