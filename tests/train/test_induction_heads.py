"""Induction heads begin with the values that copying takes, and are taught to look at what followed the last tokens before."""

from __future__ import annotations

import math

import torch

from forerun.models.heads.eagle3 import NUM_INDUCTION_HEADS
from forerun.train.copied_block import begin_from_block
from forerun.train.induction_heads import OUTPUT, QUERY, VALUE, add_induction_heads, attention_loss
from tests.train.target_folder import chat_model

DRAFT_IDS = torch.arange(0, 264, 2)


def begun():
    target = chat_model()
    content, tensors = begin_from_block(target, DRAFT_IDS, seed=0)
    embeddings = target.model.embed(DRAFT_IDS)
    return (content, tensors), add_induction_heads(content, tensors, embeddings, seed=0), embeddings


def test_heads_are_added_until_their_number_divides_the_width_and_the_others_stay():
    (before, old), (content, tensors), embeddings = begun()
    size = before["num_attention_heads"] // before["num_key_value_heads"]
    assert content[NUM_INDUCTION_HEADS] > 0
    assert embeddings.shape[1] % content["num_attention_heads"] == 0
    assert content["num_attention_heads"] == before["num_attention_heads"] + content[NUM_INDUCTION_HEADS]
    assert content["num_key_value_heads"] * size == content["num_attention_heads"]
    assert tensors[QUERY].shape[0] == content["num_attention_heads"] * content["head_dim"]
    assert torch.equal(tensors[QUERY][: len(old[QUERY])], old[QUERY])
    assert torch.equal(tensors[OUTPUT][:, : old[OUTPUT].shape[1]], old[OUTPUT])


def test_heads_are_added_once():
    _, (content, tensors), embeddings = begun()
    again, same = add_induction_heads(content, tensors, embeddings, seed=5)
    assert again == content
    assert all(same[name] is tensor for name, tensor in tensors.items())


def test_none_are_added_where_no_number_of_heads_divides_the_width():
    (content, tensors), _, embeddings = begun()
    content = {**content, "num_attention_heads": 7, "num_key_value_heads": 1}
    assert add_induction_heads(content, tensors, embeddings, seed=0) == (content, tensors)


def test_a_value_raises_the_logit_of_the_token_it_was_read_from():
    (before, _), (content, tensors), embeddings = begun()
    head_dim, width = content["head_dim"], embeddings.shape[1]
    read = torch.nn.functional.rms_norm(embeddings.float(), (width,))
    first_value, first = (before[f"num_{kind}_heads"] * head_dim for kind in ("key_value", "attention"))
    values = read @ tensors[VALUE][first_value : first_value + head_dim, :width].T
    residual = values @ tensors[OUTPUT][:, first : first + head_dim].T
    logits = (residual * tensors["norm.weight"]) @ tensors["lm_head.weight"].T
    ranks = (logits > logits.diagonal()[:, None]).sum(1)
    assert ranks.float().median() <= 3  # of 132 tokens, in 16 of 64 dimensions


def naive_loss(query, key, token_ids, rows, places):
    """`attention_loss`, place by place."""
    found = []
    for text, place in zip(rows.tolist(), places.tolist(), strict=True):
        ids, row = token_ids[text].tolist(), place - 1
        if row + 2 >= len(ids):
            continue
        wanted = [j for j in range(1, row) if ids[j - 1 : j + 2] == ids[row : row + 3]]
        if not wanted:
            continue
        for head in range(query.shape[1]):
            of_key = head // (query.shape[1] // key.shape[1])
            scores = (key[text, of_key, : row + 1] @ query[text, head, row]) / math.sqrt(query.shape[-1])
            found.append(-scores.softmax(0)[wanted].sum().log())
    return torch.stack(found).mean() if found else torch.zeros(())


def test_the_loss_is_that_of_each_place_alone():
    source = torch.Generator().manual_seed(1)
    token_ids = torch.randint(3, (4, 30), generator=source)
    query, key = (torch.randn(4, heads, 29, 8, generator=source) for heads in (6, 2))
    rows = torch.arange(4).repeat_interleave(20)
    places = torch.cat([torch.randperm(28, generator=source)[:20] + 1 for _ in range(4)])
    expected = naive_loss(query, key, token_ids, rows, places)
    assert expected > 0
    torch.testing.assert_close(attention_loss(query, key, token_ids, rows, places), expected)


def test_texts_that_copy_nothing_have_no_loss():
    token_ids = torch.arange(20)[None]
    query, key = torch.randn(1, 2, 19, 8), torch.randn(1, 1, 19, 8)
    places = torch.arange(1, 19)
    assert attention_loss(query, key, token_ids, torch.zeros(18, dtype=torch.int64), places) == 0
    assert attention_loss(query[:, :, :0], key[:, :, :0], token_ids[:, :1], places[:0], places[:0]) == 0
