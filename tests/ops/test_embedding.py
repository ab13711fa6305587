"""Embedding by its formula."""

import pytest
import torch

from forerun.ops.embedding import Embedding

TABLE = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
TOKEN_IDS = torch.tensor([3, 0, 3])


def test_each_token_gets_its_own_row():
    rows = torch.tensor([[0.0, 10.0], [1.0, 11.0], [2.0, 12.0]])
    assert Embedding(rows)(torch.tensor([2, 0, 2])).tolist() == [[2.0, 12.0], [0.0, 10.0], [2.0, 12.0]]


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_scale_is_rounded_to_the_tables_dtype(dtype):
    scale = 48**0.5  # 6.9282; 6.9375 in bf16
    found = Embedding(TABLE.bfloat16(), scale, dtype)(TOKEN_IDS)
    wide = TABLE.bfloat16()[TOKEN_IDS].float() * 6.9375
    assert torch.equal(found, wide.to(dtype or torch.bfloat16))


def test_dtype_is_the_tables_unless_asked_for():
    assert Embedding(TABLE.bfloat16())(TOKEN_IDS).dtype == torch.bfloat16
    assert Embedding(TABLE.bfloat16(), dtype=torch.float32)(TOKEN_IDS).dtype == torch.float32
