"""The device's edits of the logits are those of `SamplingRules`, by formula and on the kernels, drafted paths included."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.core.sampling_params import SamplingParams
from forerun.ops.cuda import edits
from forerun.ops.cuda.table import (
    HAS_ALLOWED,
    HAS_BIAS,
    HAS_MIN_LENGTH,
    HAS_PENALTIES,
    DeviceTable,
    RuleTable,
    StepRows,
)
from forerun.ops.sampling import SamplingRules
from tests.cuda import DEVICE, ints, random

from forerun.ops.cuda.kernels import edits as kernels  # isort: skip - tests.cuda comes first

STOP_IDS = [1, 4]


class Grammar:
    takes_drafts = True

    def __init__(self, allowed):
        self._allowed = allowed

    def allowed(self, output_ids, path=()):
        return self._allowed


def packed(allowed):
    """[V] bool -> [W] int32"""
    words = torch.zeros(-(-len(allowed) // 32) * 32, dtype=torch.int64)
    words[: len(allowed)] = allowed.long()
    words = (words.view(-1, 32) << torch.arange(32)).sum(1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(DEVICE, torch.int32)


def mask_of(ids, vocab_size):
    allowed = torch.zeros(vocab_size, dtype=torch.bool)
    allowed[list(ids)] = True
    return allowed


def put(rules, slot, params, prompt_ids, output_ids, vocab_size):
    flags = 0
    if params.allowed_token_ids is not None:
        flags |= HAS_ALLOWED
        rules.allowed[slot] = packed(mask_of(params.allowed_token_ids, vocab_size))
    if params.logit_bias:
        flags |= HAS_BIAS
        for i, (token_id, value) in enumerate(params.logit_bias.items()):
            rules.bias_ids[slot, i], rules.bias_values[slot, i] = token_id, value
    if params.min_tokens:
        flags |= HAS_MIN_LENGTH
        rules.min_length[slot] = len(prompt_ids) + params.min_tokens
        rules.stop_ids[slot, : len(STOP_IDS)] = ints(*STOP_IDS)
    rules.repetition[slot], rules.frequency[slot] = params.repetition_penalty, params.frequency_penalty
    rules.presence[slot] = params.presence_penalty
    rules.in_prompt[slot] = packed(mask_of(prompt_ids, vocab_size))
    rules.counts[slot] = torch.bincount(torch.tensor(output_ids, dtype=torch.int64), minlength=vocab_size)
    rules.flags[slot] = flags | HAS_PENALTIES


@st.composite
def requests(draw, vocab_size):
    ids = st.integers(0, vocab_size - 1)
    return SamplingParams(
        temperature=0.0,
        repetition_penalty=draw(st.sampled_from([1.0, 1.3, 0.7])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.3, -0.7])),
        presence_penalty=draw(st.sampled_from([0.0, 0.1])),
        min_tokens=draw(st.sampled_from([0, 2, 6])),
        logit_bias=draw(st.dictionaries(ids, st.sampled_from([0.1, -3.7, 100.0]), max_size=4)) or None,
        allowed_token_ids=draw(st.none() | st.lists(ids, min_size=1, max_size=40)),
    )


@settings(max_examples=12, deadline=None)
@given(st.data(), st.sampled_from([7, 33, 1030]), st.integers(1, 3), st.booleans())
def test_edits_are_those_of_the_rules(data, vocab_size, num_sequences, has_masks):
    ids = st.integers(0, vocab_size - 1)
    table = DeviceTable.empty(num_sequences, max_length=64, num_blocks=1, most_drafted=4, device=DEVICE)
    rules = RuleTable.empty(num_sequences, vocab_size, device=DEVICE)
    sequences, layout, masks = [], [], []
    for slot in range(num_sequences):
        prompt, output = data.draw(st.lists(ids, min_size=1, max_size=5)), data.draw(st.lists(ids, max_size=5))
        drafted = data.draw(st.lists(ids, max_size=4))
        parents = [data.draw(st.integers(-1, node - 1)) for node in range(len(drafted))]
        params = data.draw(requests(vocab_size))
        put(rules, slot, params, prompt, output, vocab_size)
        table.lengths[slot] = len(prompt) + len(output)
        first, paths = len(layout), [()]
        layout.append(((prompt + output)[-1], len(prompt) + len(output) - 1, slot, -1))
        for token_id, parent in zip(drafted, parents, strict=True):
            paths.append((*paths[parent + 1], token_id))
            layout.append((token_id, layout[first][1] + len(paths[-1]), slot, first + parent + 1))
        for path in paths:
            allowed = mask_of(data.draw(st.lists(ids, min_size=1, max_size=20)), vocab_size) if has_masks else None
            sequences.append((params, prompt, output, path, allowed))
            masks.append(allowed)
    num_rows = len(layout) + 1
    rows = StepRows.empty(num_rows, num_sequences, longest_path=1, device=DEVICE)
    for row, (token_id, position, slot, parent) in enumerate(layout):
        rows.tokens[row], rows.positions[row], rows.slots[row], rows.parents[row] = token_id, position, slot, parent
    logits = random(num_rows, vocab_size, scale=3.0)
    expected = logits.clone()
    for row, (params, prompt, output, path, allowed) in enumerate(sequences):
        host = SamplingRules(
            params,
            prompt_ids=prompt,
            vocab_size=vocab_size,
            stop_token_ids=frozenset(STOP_IDS),
            grammar=None if allowed is None else Grammar(allowed),
        )
        expected[row] = torch.from_numpy(host.edited(logits[row], output, path)).to(DEVICE)
    row_masks, has_row_mask = None, None
    if has_masks:
        row_masks = torch.stack([*map(packed, masks), torch.zeros_like(packed(masks[0]))])
        has_row_mask = ints(*([1] * len(masks)), 0)
    for module in (edits, kernels):
        found = logits.clone()
        module.edit(found, rows, table, rules, row_masks=row_masks, has_row_mask=has_row_mask)
        assert torch.equal(found, expected)
