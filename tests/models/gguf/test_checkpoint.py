"""Weights of GGUF files under the decoder's names."""

import contextlib
import mmap
import sys

import gguf
import numpy as np
import pytest
import torch

from forerun.errors import ModelError
from forerun.models.checkpoint import WeightReader, dense, open_checkpoint
from forerun.models.gguf import grouped
from forerun.models.gguf.checkpoint import firsts_before_seconds
from forerun.models.gguf.grouped import SCALES
from forerun.models.gguf.header import TensorPlace
from forerun.models.gguf.tensors import load_tensor
from forerun.models.gguf.types import TENSOR_TYPES
from forerun.models.loader import load_model
from forerun.ops.block_weight import BlockWeight
from tests.tiny_gguf import HEADS, save_tiny_gguf

CPU = torch.device("cpu")
DOWN, QUERY = "model.layers.1.mlp.down_proj.weight", "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """The checkpoint of a file in fp32, and the file's tensors by GGUF name."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    tensors = save_tiny_gguf(path)
    return open_checkpoint(path), tensors


@pytest.fixture(scope="module")
def in_blocks(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    tensors = save_tiny_gguf(path, quantized=True)
    return open_checkpoint(path), tensors


def test_weights_are_the_files_under_the_decoders_names(stored):
    checkpoint, tensors = stored
    assert torch.equal(checkpoint.load(DOWN), torch.from_numpy(tensors["blk.1.ffn_down.weight"]))


def test_tied_embeddings_are_one_tensor(stored):
    assert "lm_head.weight" not in stored[0].names()


def test_queries_and_keys_have_the_first_of_each_pair_before_the_second(stored):
    checkpoint, tensors = stored
    rows = torch.from_numpy(tensors["blk.0.attn_q.weight"])
    expected = rows.view(HEADS, -1, 2, rows.shape[1]).transpose(1, 2).reshape(rows.shape)
    assert torch.equal(checkpoint.load(QUERY), expected)


def test_the_order_of_rows_keeps_to_the_heads():
    assert firsts_before_seconds(12, 2).tolist() == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]


def test_matrices_stay_in_blocks(in_blocks):
    checkpoint, tensors = in_blocks
    found = checkpoint.load(DOWN)
    assert isinstance(found, BlockWeight)
    assert (found.format, found.shape) == ("Q8_0", checkpoint.shape(DOWN))
    packed = gguf.quantize(tensors["blk.1.ffn_down.weight"], gguf.GGMLQuantizationType.Q8_0)
    assert np.array_equal(found.data.numpy(), packed)


@pytest.mark.parametrize("kinds", [(), ["Q8_0"], ["Q4_1"], ["TQ2_0"]])
def test_a_factor_of_a_weight_multiplies_its_values(tmp_path, kinds):
    own = {"blk.1.ffn_down.scale": np.float32([0.5]), "blk.1.ffn_down.input_scale": np.float32([3.0])}
    own |= {"blk.0.attn_q.scale": np.float32([0.25])}
    for name, changes in (("plain", {}), ("with", own)):
        save_tiny_gguf(tmp_path / f"{name}.gguf", kinds=kinds, changes=changes)
    plain, found = (open_checkpoint(tmp_path / f"{name}.gguf") for name in ("plain", "with"))
    assert found.names() == plain.names()
    for name, factor in ((DOWN, 0.5), (QUERY, 0.25), (UP, 1.0)):
        assert torch.equal(dense(found.load(name)), dense(plain.load(name)) * factor)


@pytest.mark.parametrize("factor", [[1.0, 2.0], [float("nan")]])
def test_a_factor_that_is_no_number_is_refused(tmp_path, factor):
    save_tiny_gguf(tmp_path / "x.gguf", changes={"blk.1.ffn_down.scale": np.float32(factor)})
    with pytest.raises(ModelError, match=r"tensor 'blk.1.ffn_down.scale' is no single number"):
        open_checkpoint(tmp_path / "x.gguf").load(DOWN)


def save_experts(path, tensor, kind="F32", **more):
    """A file of the gates of all experts of a layer."""
    writer = gguf.GGUFWriter(str(path), "qwen3moe")
    writer.add_tensor("blk.0.ffn_gate_exps.weight", tensor, raw_dtype=gguf.GGMLQuantizationType[kind])
    for name, values in more.items():
        writer.add_tensor(f"blk.0.ffn_gate_exps.{name}", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_0"])
def test_each_expert_has_its_part_of_the_tensor_of_all(tmp_path, kind):
    stacked = np.random.default_rng(0).normal(size=(5, 24, 32)).astype(np.float32)
    blocks = gguf.quantize(stacked, gguf.GGMLQuantizationType[kind])
    checkpoint = open_checkpoint(
        save_experts(tmp_path / "tiny.gguf", blocks, kind, scale=np.arange(5, dtype=np.float32))
    )
    values = gguf.dequantize(blocks, gguf.GGMLQuantizationType[kind])
    for number in range(5):
        name = f"model.layers.0.mlp.experts.{number}.gate_proj.weight"
        assert checkpoint.shape(name) == (24, 32)
        np.testing.assert_allclose(dense(checkpoint.load(name)).numpy(), number * values[number], rtol=1e-6)


def test_factors_of_fewer_experts_than_there_are_matrices_are_refused(tmp_path):
    path = save_experts(tmp_path / "tiny.gguf", np.ones((5, 1, 1), np.float32), scale=np.ones(1, np.float32))
    with pytest.raises(ModelError, match=r"'blk.0.ffn_gate_exps.scale' has factors of 1 experts"):
        open_checkpoint(path)


def test_more_experts_than_a_layer_has_are_named(tmp_path):
    path = save_experts(tmp_path / "tiny.gguf", np.zeros((1025, 1, 1), dtype=np.float32))
    with pytest.raises(ModelError, match=r"'blk.0.ffn_gate_exps.weight' is of 1025 experts; may be of at most 1024"):
        open_checkpoint(path)


def test_blocks_that_were_forgotten_are_read_again(tmp_path):
    row, pages = 34 * 8, 3 * mmap.PAGESIZE  # bytes of an output; of the whole tensor, at least
    content = np.random.default_rng(0).integers(0, 256, (-(-pages // row), row), dtype=np.uint8)
    file = tmp_path / "tensor"
    file.write_bytes(b"header" * 1000 + content.tobytes())
    place = TensorPlace("x", (len(content), 256), TENSOR_TYPES[8], file, 6000, content.nbytes)
    found = load_tensor(place)
    for begin, end in [(0, content.nbytes), (100, 200), (0, 1), (mmap.PAGESIZE, 2 * mmap.PAGESIZE)]:
        found.forget(begin, end)
        assert np.array_equal(found.data.numpy(), content)


def test_rows_of_blocks_are_ordered_as_rows_of_floats_are(in_blocks):
    checkpoint, tensors = in_blocks
    packed = gguf.quantize(tensors["blk.0.attn_q.weight"], gguf.GGMLQuantizationType.Q8_0)
    values = torch.from_numpy(gguf.dequantize(packed, gguf.GGMLQuantizationType.Q8_0))
    assert torch.equal(checkpoint.load(QUERY).dequantize(), values[firsts_before_seconds(len(values), HEADS)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_are_read_as_dense_weights_of_the_models_dtype(in_blocks, dtype, monkeypatch):
    monkeypatch.setattr("forerun.ops.block_weight.READ_AT_ONCE", 100)  # several steps
    reader = WeightReader(in_blocks[0], dtype=dtype, device=CPU)
    expected = in_blocks[0].load(DOWN).dequantize().to(dtype)
    assert torch.equal(reader.tensor(DOWN, tuple(expected.shape)), expected)
    name = DOWN.removesuffix(".weight")
    joined = reader.linear([name, name], [32, 32], width=64, bias=False).weight
    assert torch.equal(joined, torch.cat([expected, expected]))


def test_the_mapped_file_is_never_written_to(stored):
    reader = WeightReader(stored[0], dtype=torch.float32, device=CPU)
    shape = stored[0].shape(DOWN)
    before = stored[0].load(DOWN).clone()
    reader.tensor(DOWN, shape).zero_()
    assert torch.equal(stored[0].load(DOWN), before)


def save_types(path, kind, *, below=120, rows=4):
    """A file whose one matrix is of a type, and its values by the gguf package; of bytes below 120 no scale is infinite."""
    number = gguf.GGMLQuantizationType[kind]
    weights, size = gguf.GGML_QUANT_SIZES[number]
    random = np.random.default_rng(1)
    blocks = random.integers(0, below, (rows, 2 * size), dtype=np.uint8)
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_tensor("blk.0.ffn_up.weight", blocks, raw_dtype=number)
    writer.add_head_count(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with np.errstate(invalid="ignore"):
        values = gguf.dequantize(blocks, number).astype(np.float32)
    return torch.from_numpy(values).view(rows, 2 * weights)


UP = "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize("kind", SCALES)
def test_types_without_kernels_stay_in_blocks_of_just_their_values(tmp_path, kind, monkeypatch):
    monkeypatch.setattr(grouped, "READ_AT_ONCE", 1000)  # several steps
    values = save_types(tmp_path / "x.gguf", kind, rows=400)
    checkpoint = open_checkpoint(tmp_path / "x.gguf")
    found = checkpoint.load(UP)
    assert isinstance(found, BlockWeight)
    assert torch.equal(found.dequantize(), values)
    assert found.nbytes == 1.5 * values.numel() == checkpoint.facts.num_bytes
    assert checkpoint.facts.is_mixed


@pytest.mark.parametrize(("keeps_blocks", "times"), [(True, 1), (False, 0)])
def test_that_such_types_take_more_than_their_file_is_told_once_where_they_stay_in_blocks(
    tmp_path, keeps_blocks, times, caplog
):
    values = save_types(tmp_path / "x.gguf", "IQ2_XXS", rows=4)
    reader = WeightReader(
        open_checkpoint(tmp_path / "x.gguf"), dtype=torch.bfloat16, device=CPU, keeps_blocks=keeps_blocks
    )
    for _ in range(2):
        reader.matrix(UP, tuple(values.shape))
    assert caplog.text.count("take 1.5 bytes each") == times


@pytest.mark.parametrize("kind", ["IQ2_XXS", "IQ1_M", "TQ2_0"])
def test_scales_that_are_no_numbers_leave_values_that_are_none(tmp_path, kind):
    values = save_types(tmp_path / "x.gguf", kind, below=256, rows=400)
    assert not values.isfinite().all()
    found = open_checkpoint(tmp_path / "x.gguf").load(UP)
    assert torch.equal(found.nan_to_num(7.0), values.nan_to_num(7.0))


@pytest.mark.parametrize(("value", "is_said"), [(0.1, True), (0.5, False)])
def test_numbers_of_64_bits_become_such_of_32_and_it_is_said_where_that_changes_one(tmp_path, value, is_said, caplog):
    writer = gguf.GGUFWriter(str(tmp_path / "x.gguf"), "llama")
    writer.add_tensor("blk.0.ffn_up.weight", np.full((2, 4), value))
    writer.add_head_count(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = open_checkpoint(tmp_path / "x.gguf").load(UP)
    assert torch.equal(found, torch.full((2, 4), value))
    assert ("'blk.0.ffn_up.weight' is rounded from 64 bits to 32" in caplog.text) == is_said


def test_types_without_kernels_are_named_where_the_gguf_package_is_missing(tmp_path, monkeypatch):
    save_types(tmp_path / "x.gguf", "IQ2_S")
    monkeypatch.setitem(sys.modules, "gguf.quants", None)
    with pytest.raises(ModelError, match="type IQ2_S, which is read with the package gguf; run 'pip install gguf'"):
        open_checkpoint(tmp_path / "x.gguf").load("model.layers.0.mlp.up_proj.weight")


def test_a_type_that_is_newer_than_the_gguf_package_is_named(tmp_path, monkeypatch):
    save_types(tmp_path / "x.gguf", "NVFP4")
    monkeypatch.setattr(grouped, "_gguf_package", lambda place: (gguf.quants, {}))
    with pytest.raises(ModelError, match="type NVFP4, which cannot be read"):
        open_checkpoint(tmp_path / "x.gguf").load(UP)


@pytest.mark.parametrize("kind", ["Q8_K", "Q8_1"])
def test_types_that_nothing_reads_are_named(tmp_path, kind):
    with contextlib.suppress(NotImplementedError):  # of the values; the file is there
        save_types(tmp_path / "x.gguf", kind)
    with pytest.raises(ModelError, match=f"type {kind}, which cannot be read"):
        open_checkpoint(tmp_path / "x.gguf").load("model.layers.0.mlp.up_proj.weight")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"blk.1.ffn_down.weight": None}, "tensor 'model.layers.1.mlp.down_proj.weight' is missing"),
        ({"blk.1.ffn_up.weight": np.zeros((65, 32), np.float32)}, "has shape [65, 32], expected [64, 32]"),
        ({"blk.1.ffn_extra.weight": np.zeros((4, 32), np.float32)}, "got surplus tensor 'blk.1.ffn_extra.weight'"),
    ],
)
def test_tensors_that_do_not_fit_are_named_with_their_file_and_what_is_inside(tmp_path, changes, said):
    save_tiny_gguf(tmp_path / "tiny.gguf", changes=changes)
    with pytest.raises(ModelError) as found:
        load_model(tmp_path / "tiny.gguf", dtype=torch.float32, device=CPU)
    count = 20 + sum(+1 if "extra" in name else -1 if x is None else 0 for name, x in changes.items())
    assert str(found.value).startswith(f"{tmp_path / 'tiny.gguf'} (GGUF: {count} tensors F32): ")
    assert said in str(found.value)
    assert "config.json" not in str(found.value)


@pytest.mark.parametrize("is_in_blocks", [False, True])
def test_a_norm_that_is_no_vector_is_named(tmp_path, is_in_blocks):
    writer = gguf.GGUFWriter(str(tmp_path / "x.gguf"), "gemma2")
    values = np.ones((2, 32), np.float32)
    q8_0 = gguf.GGMLQuantizationType.Q8_0
    if is_in_blocks:
        writer.add_tensor("output_norm.weight", gguf.quantize(values, q8_0), raw_dtype=q8_0)
    else:
        writer.add_tensor("output_norm.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"tensor 'model.norm.weight' has shape \[2, 32\], expected one dimension"):
        open_checkpoint(tmp_path / "x.gguf").load("model.norm.weight")


def test_rows_that_are_no_pairs_of_all_heads_are_named(tmp_path):
    save_tiny_gguf(tmp_path / "tiny.gguf", changes={"blk.0.attn_q.weight": np.zeros((36, 32), np.float32)})
    with pytest.raises(ModelError, match=r"q_proj.weight' has shape \[36, 32\], expected a multiple of 8 rows"):
        open_checkpoint(tmp_path / "tiny.gguf").load(QUERY)


def test_a_file_that_was_cut_after_it_was_opened_is_an_error(tmp_path):
    save_tiny_gguf(tmp_path / "tiny.gguf")
    checkpoint = open_checkpoint(tmp_path / "tiny.gguf")
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match="cannot be read"):
        checkpoint.load(DOWN)
