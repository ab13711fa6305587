"""Checkpoints that the speculators library wrote compute here what they compute there.

The library has an environment of its own: python -m benchmarks.peers install speculators.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from forerun import SamplingParams
from forerun.core.batch import ForwardBatch, SequenceRows
from forerun.kv.cache import KVCache
from forerun.models.base import choose_attention
from forerun.models.heads.dflash import load_dflash
from forerun.models.heads.eagle3 import load_eagle3, load_peagle
from tests.engines import native_target, tiny_llm, tiny_target
from tests.native import needs_kernels
from tests.slow.environments import interpreter_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SCRIPT = Path(__file__).with_name("speculators_oracle.py")
NO_DIFFERENCE = {"rtol": 1e-4, "atol": 1e-4}
PAGE = 4


def made_by_speculators(folder, kind, target=None, **options):
    """A checkpoint of the library's for a target, by default the tiny one, in `folder`, and what the library computed with it."""
    python = interpreter_of("speculators")
    model = (target or tiny_target()).model
    ids = torch.arange(model.vocab_size)
    tables = {"embedding": model.embed(ids), "head": model.head_rows(ids)}
    save_file({name: table.contiguous() for name, table in tables.items()}, folder / "target.safetensors")
    command = [str(python), str(SCRIPT), str(folder), kind, json.dumps(options)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (folder / "target.safetensors").unlink()
    oracle = load_file(folder / "oracle.safetensors")
    (folder / "oracle.safetensors").unlink()
    return oracle


class Run:
    """A head over a paged cache, fed rows of one text."""

    def __init__(self, head, *, kernels=None):
        self.head = head
        self.attention = choose_attention(head.kv_specs, kernels)
        self.num_places = 0
        self.cache = KVCache(head.kv_specs, num_blocks=40, block_size=PAGE, dtype=head.dtype, device=head.device)

    def attend(self, num_rows, mask=None, *, start=None):
        """Attention for rows at the next places; `mask` as in `SequenceRows`."""
        start = self.num_places if start is None else start
        rows = SequenceRows(
            num_context=start, num_rows=num_rows, block_ids=np.arange(40, dtype=np.int32), tree_mask=mask
        )
        places = torch.arange(start, start + num_rows)
        batch = ForwardBatch(
            token_ids=places,
            positions=places,
            slot_mapping=places,
            sequences=[rows],
            block_size=PAGE,
            logits_rows=torch.arange(num_rows),
        )
        self.num_places = start + num_rows
        return self.attention.begin(batch, self.cache)


def on_kernels():
    """A tiny target in fp32 on the native kernels."""
    return native_target(torch.float32)


def features_of(oracle, count):
    """One tensor per feature, [T, width]."""
    return list(oracle["features"].chunk(count, dim=-1))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_draft": 97},
        {"num_layers": 2},
        {"num_aux": 2},
        {"norm_before_residual": True},
        {"norm_before_fc": True},
        {"fc_norm": True},
        {"norm_output": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("make_target", [tiny_target, pytest.param(on_kernels, marks=needs_kernels)])
def test_eagle3(make_target, options, tmp_path):
    target = make_target()
    oracle = made_by_speculators(tmp_path, "eagle3", target, **options)
    head = load_eagle3(tmp_path, target)
    tokens, count = oracle["tokens"], len(oracle["tokens"])
    run = Run(head, kernels=target.kernels)
    eye = torch.eye(count, dtype=torch.bool)
    mask = torch.ones(count, count, dtype=torch.bool).tril()
    with torch.inference_mode():
        states, positions = head.fuse(features_of(oracle, len(head.needs))), torch.arange(count)
        for step, expected in enumerate(oracle["logits"]):
            outputs = head.forward(tokens, states, positions, run.attend(count, mask))
            torch.testing.assert_close(head.logits(outputs), expected, **NO_DIFFERENCE)
            # each row goes on alone: with the next token of the text, and with what itself and its steps have left
            states, positions = head.states(outputs), positions + 1
            tokens = torch.cat([oracle["tokens"][step + 1 :], torch.zeros(step + 1, dtype=torch.int64)])
            mask = torch.cat([mask, eye], dim=1)


@pytest.mark.parametrize(
    "options", [{}, {"norm_before_residual": True, "norm_before_fc": True}, {"num_layers": 1}], ids=str
)
def test_peagle(options, tmp_path):
    oracle = made_by_speculators(tmp_path, "peagle", **options)
    head = load_peagle(tmp_path, tiny_target())
    checked = 0
    with torch.inference_mode():
        states = head.fuse(features_of(oracle, 3))
        for anchor in (0, 3, 11):
            mine = oracle["anchors"] == anchor
            depths = oracle["depths"][mine]
            num_masks = int(depths.max())
            tokens = torch.cat([oracle["tokens"][: anchor + 1], torch.full((num_masks,), head.mask.token_id)])
            given = torch.cat([states[: anchor + 1], head.mask.state.expand(num_masks, -1)])
            outputs = head.forward(tokens, given, torch.arange(len(tokens)), Run(head).attend(len(tokens)))
            expected = oracle["logits"][mine][depths.argsort()]
            torch.testing.assert_close(head.logits(outputs[anchor:]), expected, **NO_DIFFERENCE)
            checked += num_masks
    assert checked >= 6


@pytest.mark.parametrize("options", [{}, {"num_draft": 40}, {"num_layers": 1, "block_size": 4}], ids=str)
def test_dflash(options, tmp_path):
    oracle = made_by_speculators(tmp_path, "dflash", **options)
    head = load_dflash(tmp_path, tiny_target())
    with torch.inference_mode():
        for anchor, expected in zip(oracle["anchors"].tolist(), oracle["logits"], strict=True):
            run, places = Run(head), torch.arange(anchor)
            written = head.context([one[:anchor] for one in features_of(oracle, 2)], places)
            for kept, new in zip(run.cache.layers, written, strict=True):
                kept.key[places], kept.value[places] = new.key, new.value
            num_rows = len(expected)
            tokens = torch.tensor([int(oracle["tokens"][anchor]), *[3] * (num_rows - 1)])
            whole = run.attend(num_rows, torch.ones(num_rows, num_rows, dtype=torch.bool), start=anchor)
            causal = run.attend(num_rows, start=anchor)
            outputs = head.forward(tokens, anchor + torch.arange(num_rows), whole, causal)
            torch.testing.assert_close(head.logits(outputs), expected, **NO_DIFFERENCE)


@pytest.mark.parametrize("method", ["eagle3", "peagle", "dflash"])
def test_a_checkpoint_of_the_library_drafts_in_the_engine(method, tmp_path):
    made_by_speculators(tmp_path, method)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    llm = tiny_llm({"method": method, "model": str(tmp_path), "num_speculative_tokens": 3})
    (drafted,) = llm.generate([{"prompt_token_ids": [1, 2, 3]}], params, use_tqdm=False)
    (plain,) = tiny_llm(None).generate([{"prompt_token_ids": [1, 2, 3]}], params, use_tqdm=False)
    assert drafted.outputs[0].token_ids == plain.outputs[0].token_ids
    assert llm.executor.drafting.num_failures == 0
