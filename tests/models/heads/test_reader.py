"""What a head shares with its target, and what it must not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from forerun.core.batch import LayerKVSpec
from forerun.errors import ModelError
from forerun.models.heads.reader import HeadReader, head_config
from tests.engines import VOCAB_SIZE, native_target, tiny_target
from tests.heads_eagle import LAYER, eagle
from tests.models.state_dict import InMemoryCheckpoint
from tests.native import generator, needs_kernels
from tests.ops.native.passes import filled_cache, random_batch, source

TARGETS = [pytest.param(tiny_target, id="torch"), pytest.param(native_target, id="kernels", marks=needs_kernels)]


def reader_of(tensors, target):
    return HeadReader({}, InMemoryCheckpoint(tensors), target)


def rows_of(read, model):
    """A copy of one of the target's tables, in its own dtype."""
    return read(torch.arange(model.vocab_size)).to(model.dtype)


@pytest.mark.parametrize("make", TARGETS)
def test_tables_that_are_absent_are_the_targets(make):
    target = make()
    reader = reader_of({}, target)
    assert reader.embedding(width=target.model.hidden_size) == target.model.embed
    assert reader.head(outputs=target.model.vocab_size, width=target.model.hidden_size) == target.model.logits


@pytest.mark.parametrize("make", TARGETS)
def test_tables_that_equal_the_targets_are_not_kept_twice(make):
    model = make().model
    tensors = {
        "embed_tokens.weight": rows_of(model.embed, model),
        "lm_head.weight": rows_of(model.head_rows, model),
    }
    reader = reader_of(tensors, make())
    assert reader.embedding(width=model.hidden_size) == model.embed
    assert reader.head(outputs=model.vocab_size, width=model.hidden_size) == model.logits
    reader.finish()


@pytest.mark.parametrize("make", TARGETS)
def test_tables_that_differ_in_one_number_are_the_heads_own(make):
    model = make().model
    table, weights = rows_of(model.embed, model), rows_of(model.head_rows, model)
    table[-1, 0] += 1
    weights[-1, 0] += 1
    reader = reader_of({"embed_tokens.weight": table, "lm_head.weight": weights}, make())
    embed = reader.embedding(width=model.hidden_size)
    head = reader.head(outputs=model.vocab_size, width=model.hidden_size)
    assert torch.equal(embed(torch.tensor([model.vocab_size - 1])).to(table.dtype), table[-1:])
    one = torch.zeros(1, model.hidden_size, dtype=reader.stream_dtype)
    one[0, 0] = 1.0
    torch.testing.assert_close(head(one)[0].to(weights.dtype), weights[:, 0])


def test_a_table_of_another_shape_is_refused():
    reader = reader_of({"embed_tokens.weight": torch.zeros(5, 48)}, tiny_target())
    with pytest.raises(ModelError, match=r"has shape \[5, 48\], expected \[97, 48\]"):
        reader.embedding(width=48)


def test_layers_that_the_decoder_has_no_code_for_are_refused():
    config, _ = eagle(tiny_target())
    with pytest.raises(ModelError, match=r"config\.json of the head"):
        head_config(config | {"hidden_act": "mystery"}, architecture="LlamaForCausalLM")


def test_rope_is_the_heads_own_and_never_the_targets():
    config, _ = eagle(tiny_target())
    (rope,) = set(head_config(config, architecture="LlamaForCausalLM").ropes)
    assert (rope.theta, rope.dim) == (10000.0, 12)
    assert config["vocab_size"] == VOCAB_SIZE


@needs_kernels
@pytest.mark.parametrize("inner", [56, 57])
def test_layers_of_any_width_compute_in_bf16_what_they_do_in_fp32(inner, monkeypatch):
    monkeypatch.setitem(LAYER, "intermediate_size", inner)  # the kernels compute no layers of odd widths
    content, tensors = eagle(native_target(), num_layers=2)
    tensors.add_norm("layers.0.input_layernorm", content["hidden_size"])
    config = replace(head_config(content, architecture="LlamaForCausalLM"), root="")
    batch, num_blocks = random_batch(source(2), [(0, 5)], block_size=4)
    hidden = torch.randn(5, config.hidden_size, generator=generator(3))
    outputs = []
    for target in (native_target(), native_target(torch.float32)):
        reader = reader_of(tensors, target)
        spec = LayerKVSpec(num_kv_heads=config.num_kv_heads, key_dim=config.head_dim, value_dim=config.head_dim)
        cache = filled_cache([spec] * 2, num_blocks=num_blocks, block_size=4, dtype=target.model.dtype)
        attend = target.attention.begin(batch, cache)
        outputs.append(reader.layers(config)(hidden, reader.rotations(config)(batch.positions), attend, 0, 2))
    added = (outputs[1] - hidden).norm()
    assert (outputs[0] - outputs[1]).norm() < 2e-2 * added
