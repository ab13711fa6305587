"""Training lowers the loss of its formula, begins from a copy of a block, and goes on after an interruption to the bit."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

from forerun import LLM, SamplingParams
from forerun.errors import ConfigError
from forerun.models.checkpoint import SafetensorsCheckpoint, StateDict, renamed
from forerun.models.heads.eagle3 import MASK, PEagleHead, canonical_name
from forerun.models.heads.reader import HeadReader
from forerun.train import eagle3_trainer
from forerun.train.attention import FlashUnrolledAttention, UnrolledAttention
from forerun.train.copied_block import begin_from_block
from forerun.train.draft_loss import ROWS_AT_ONCE
from forerun.train.eagle3_trainer import Eagle3Trainer, Eagle3TrainSettings
from forerun.train.induction_heads import add_induction_heads
from forerun.train.objectives import peagle_loss, unrolled_loss
from forerun.train.packaging import LAYOUTS, save_head
from forerun.train.selection import LearnedText
from forerun.train.target import Batch, load_for_training, observe
from tests.engines import native_target, tiny_target
from tests.native import needs_kernels
from tests.train.target_folder import chat_model, chat_model_folder

DRAFT_IDS = torch.arange(0, 264, 2)


def learned(count=24, length=30):
    source = torch.Generator().manual_seed(3)
    return [
        LearnedText(
            number=i,
            token_ids=torch.randint(250, (length + i % 5,), generator=source).numpy(),
            places=np.arange(6, length - 1),
        )
        for i in range(count)
    ]


def trainer(target=None, *, adds_heads=False, **changes):
    settings = Eagle3TrainSettings(
        **({"num_steps": 6, "batch_tokens": 200, "pass_tokens": 100, "measured_every": 1} | changes)
    )
    begun = begin_from_block(chat_model(), DRAFT_IDS, seed=0)
    if adds_heads:
        begun = add_induction_heads(*begun, chat_model().model.embed(DRAFT_IDS), seed=0)
    return Eagle3Trainer(target or chat_model(), *begun, learned(), settings)


@functools.cache
def torch_target():
    """The same model as torch computes it, without the native kernels, as on a GPU."""
    return load_for_training(str(chat_model_folder()), dtype=torch.bfloat16)


def test_a_head_begins_as_a_copy_of_the_last_block():
    content, tensors = begin_from_block(chat_model(), DRAFT_IDS, seed=0)
    stored = load_file(chat_model_folder() / "model.safetensors")
    prefix = f"model.layers.{chat_model().model.num_layers - 1}."
    width = content["hidden_size"]
    for name in ("q_proj", "k_proj", "v_proj"):
        found = tensors[f"midlayer.self_attn.{name}.weight"]
        assert torch.equal(found[:, width:], stored[f"{prefix}self_attn.{name}.weight"].float())
    assert torch.equal(tensors["midlayer.mlp.down_proj.weight"], stored[f"{prefix}mlp.down_proj.weight"].float())
    assert torch.equal(tensors["norm.weight"], stored["model.norm.weight"].float())
    assert (tensors["d2t"] + torch.arange(len(DRAFT_IDS))).tolist() == DRAFT_IDS.tolist()
    assert tensors["lm_head.weight"].shape == (len(DRAFT_IDS), width)


def test_a_head_begins_with_its_tensors_in_one_order_in_every_process(monkeypatch):
    """A set of names has another order in each, and gradients are clipped by a sum over tensors, whose last bits go by it."""
    orders = []
    for is_reversed in (False, True):
        names = dict.fromkeys(sorted(load_file(chat_model_folder() / "model.safetensors"), reverse=is_reversed)).keys()
        monkeypatch.setattr(SafetensorsCheckpoint, "names", lambda self, names=names: names)
        orders.append(list(begin_from_block(chat_model(), DRAFT_IDS, seed=0)[1]))
    assert orders[0] == orders[1]


def gradients_of_a_step(own, monkeypatch):
    """The head's gradients, one after the other, and what the step reports."""
    found = []
    monkeypatch.setattr(
        eagle3_trainer, "clip_grad_norm_", lambda tensors, _: found.extend(t.grad.clone() for t in tensors)
    )
    report = own.run_step()
    return torch.cat([gradient.flatten() for gradient in found]), report


@needs_kernels
@pytest.mark.parametrize("hybrid_share", [0.0, 1.0])
def test_a_step_on_the_kernels_has_the_gradients_of_one_in_torch(hybrid_share, monkeypatch):
    assert chat_model().kernels is not None
    settings = {"hybrid_share": hybrid_share, "adds_heads": True, "masked_every": 1}
    found, report = gradients_of_a_step(trainer(**settings), monkeypatch)
    expected, expected_report = gradients_of_a_step(trainer(torch_target(), **settings), monkeypatch)
    assert (found - expected).norm() < 0.05 * expected.norm()  # products are of bf16 in both
    assert report.loss == pytest.approx(expected_report.loss, rel=0.01)
    assert report.acceptance == pytest.approx(expected_report.acceptance, rel=0.02)


def test_a_model_without_files_is_refused():
    with pytest.raises(ConfigError, match="was made in memory"):
        begin_from_block(tiny_target(), torch.arange(40), seed=0)


def test_training_lowers_the_loss_and_changes_every_tensor():
    training = trainer(num_steps=25, learning_rate=5e-3)
    before = {name: tensor.clone() for name, tensor in training.tensors().items()}
    reports = [training.run_step() for _ in range(25)]
    assert reports[-1].loss < reports[0].loss
    for name, tensor in training.tensors().items():
        if tensor.is_floating_point():
            assert not torch.equal(tensor, before[name]), name
            assert tensor.isfinite().all(), name
    assert len(reports[0].acceptance) == len(reports[0].agreement) == 3


def test_the_loss_is_that_of_the_unrolled_formula_where_nothing_lies_outside_the_draft_vocabulary():
    training = trainer()
    batch = observe(chat_model(), [text.token_ids.tolist() for text in learned(2)], frozenset(training._head().needs))
    head = training._head()
    is_text = torch.zeros_like(batch.is_text)
    for row, text in enumerate(learned(2)):
        is_text[row, text.places] = True
    outside = torch.ones(264, dtype=torch.bool).index_fill(0, DRAFT_IDS, value=False)
    logits = batch.logits.masked_fill(outside, float("-inf"))
    whole = Batch(
        token_ids=batch.token_ids,
        is_text=is_text,
        features={name: rows.to(head.dtype) for name, rows in batch.features.items()},
        logits=logits,
    )
    expected = unrolled_loss(head, whole, num_passes=3, decay=0.8)
    observed = training._observer.observe(learned(2))
    wanted = observed.wanted / observed.wanted.sum(-1, keepdim=True)
    counts = torch.tensor([float(sum(len(text.places) for text in learned(2)))] * 3)
    weights = 0.8 ** torch.arange(3) / counts
    found = training._loss(replace(observed, wanted=wanted), weights, weights[:0], None)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=1e-2)
    with_masks = training._loss(replace(observed, wanted=wanted), weights[:1], 1 / counts, None)
    torch.testing.assert_close(with_masks, peagle_loss(head, whole, num_tokens=3), rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_head_drafts_step_by_step_and_from_masks(tmp_path, layout):
    training = trainer(num_steps=30, masked_every=1)
    for _ in range(30):
        training.run_step()
    assert training.tensors()[MASK].abs().max() > 0
    save_head(tmp_path, training.content, training.tensors(), layout=layout, target=chat_model_folder())
    for method in ("eagle3", "peagle"):
        config = {"method": method, "model": str(tmp_path), "num_speculative_tokens": 3}
        drafting, plain = (
            LLM(str(chat_model_folder()), max_model_len=64, speculative_config=c) for c in (config, None)
        )
        params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
        texts = [llm.generate([[5, 6, 7]], params, use_tqdm=False)[0].outputs[0].token_ids for llm in (drafting, plain)]
        assert texts[0] == texts[1]
        assert drafting.stats.speculation.num_draft_tokens > 20
        assert drafting.executor.drafting.num_failures == 0


def test_an_interrupted_run_ends_in_the_same_head(tmp_path):
    whole = trainer()
    for _ in range(6):
        whole.run_step()
    first = trainer()
    for _ in range(4):
        first.run_step()
    first.save(tmp_path / "state.safetensors")
    second = trainer()
    second.resume(tmp_path / "state.safetensors")
    assert (second.step, second.num_tokens) == (first.step, first.num_tokens)
    for _ in range(2):
        second.run_step()
    for name, tensor in whole.tensors().items():
        assert torch.equal(second.tensors()[name], tensor), name


def test_a_state_that_does_not_fit_on_the_disk_leaves_the_one_before(tmp_path, monkeypatch):
    def full(tensors, path, *, metadata):
        path.write_bytes(b"a part")
        raise OSError(28, "No space left on device")

    path = tmp_path / "state.safetensors"
    training = trainer()
    training.run_step()
    training.save(path)
    whole = path.read_bytes()
    training.run_step()
    monkeypatch.setattr("forerun.train.kept_files.save_tensors", full)
    with pytest.raises(ConfigError, match=r"No space left on device.*; make room and give the same command again"):
        training.save(path)
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == whole


MOST_ROWS = ROWS_AT_ONCE["cpu"]


class WideTensors(TorchDispatchMode):
    """Counts the tensors in fp32 or wider that have more rows of a vocabulary than are computed at a time."""

    num_found = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for one in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(one, torch.Tensor) and one.ndim > 1 and one.shape[-1] in (264, len(DRAFT_IDS)):
                self.num_found += one.dtype.itemsize > 2 and one.numel() // one.shape[-1] > MOST_ROWS
        return made


def test_masks_have_a_quarter_of_the_passes_weight(monkeypatch):
    training, seen = trainer(batch_tokens=400, pass_tokens=40), []

    def loss(observed, weights, mask_weights, measured):
        seen.append((len(observed.places), weights, mask_weights))
        return torch.zeros((), requires_grad=True)

    monkeypatch.setattr(training, "_loss", loss)
    for _ in range(4):
        training.run_step()
    of_passes, of_masks = (sum(num_places * sum(of[at][1:]) for num_places, *of in seen) for at in range(2))
    assert of_masks == pytest.approx(of_passes / 4, rel=0.1)
    assert all(mask_weights in ([], weights) for _, weights, mask_weights in seen)


@needs_kernels
@pytest.mark.parametrize("most_rows", [MOST_ROWS, 1000])
@pytest.mark.parametrize("kind", ["kernels", "torch"])
def test_no_logits_of_all_places_are_in_fp32(monkeypatch, kind, most_rows):
    monkeypatch.setitem(ROWS_AT_ONCE, "cpu", most_rows)
    target = native_target() if kind == "kernels" else torch_target()
    assert target.model.dtype == torch.bfloat16
    training = trainer(target, batch_tokens=1000, pass_tokens=1000, masked_every=1)
    with WideTensors() as wide:
        training.run_step()
    assert (wide.num_found == 0) == (most_rows == MOST_ROWS)


def test_without_kernels_the_same_is_learnt_in_bf16_from_masters_in_fp32():
    native, plain = trainer(), trainer(torch_target())
    assert torch_target().kernels is None
    assert plain._head().dtype == torch.bfloat16
    for _ in range(6):
        expected, found = native.run_step(), plain.run_step()
        assert found.loss == pytest.approx(expected.loss, rel=0.02)
        assert found.acceptance == pytest.approx(expected.acceptance, rel=0.05)
    for name, tensor in plain.tensors().items():
        assert tensor.dtype == (torch.float32 if tensor.is_floating_point() else native.tensors()[name].dtype)


def test_attention_for_other_devices_gives_the_same_gradients(monkeypatch):
    found = []
    for attention in (FlashUnrolledAttention, UnrolledAttention):
        monkeypatch.setattr(
            eagle3_trainer, "unrolled_attention", lambda num_texts, device, kernels, kind=attention: kind(num_texts)
        )
        training = trainer(torch_target(), adds_heads=True)
        loss = training._loss(training.observe(learned(4)), [0.1, 0.08, 0.06], [0.1, 0.1, 0.1], None)
        loss.backward()
        found.append({name: tensor.grad for name, tensor in training._masters.items() if tensor.requires_grad})
    for name, gradient in found[0].items():
        assert gradient.norm() > 0
        assert (found[1][name] - gradient).norm() < 0.05 * gradient.norm(), name


@pytest.mark.parametrize("attention", [FlashUnrolledAttention, UnrolledAttention])
def test_a_step_makes_all_tensors_on_the_targets_device(monkeypatch, attention):
    monkeypatch.setattr(eagle3_trainer, "unrolled_attention", lambda num_texts, device, kernels: attention(num_texts))
    training = trainer(torch_target(), adds_heads=True, masked_every=1)
    training.run_step()  # plans the batches, which is done on the CPU
    heads = [training._head() for _ in range(10)]  # whose tables of rotations are made there, too, and then moved
    monkeypatch.setattr(training, "_head", heads.pop)
    texts = learned(2)
    # what is made without naming a device lies on this one, and fails with all that lies elsewhere
    with torch.device("meta"):
        report = training.run_step()
        logits = training.logits(training.observe(texts))
    assert report.loss > 0
    assert logits.isfinite().all()


def test_a_state_of_a_head_that_drafts_other_tokens_is_refused(tmp_path):
    path = tmp_path / "state.safetensors"
    trainer().save(path)
    begun = begin_from_block(chat_model(), DRAFT_IDS + 1 - DRAFT_IDS // 250, seed=0)
    assert len(begun[1]["d2t"]) == len(DRAFT_IDS)
    other = Eagle3Trainer(chat_model(), *begun, learned(), Eagle3TrainSettings(num_steps=6))
    with pytest.raises(ConfigError, match=r"the head in it drafts other tokens.*delete it to train from the beginning"):
        other.resume(path)


def test_a_state_that_is_none_is_refused(tmp_path):
    path = tmp_path / "state.safetensors"
    path.write_bytes(b"nonsense")
    with pytest.raises(ConfigError, match="cannot be resumed from"):
        trainer().resume(path)


def test_the_engine_computes_the_trainers_logits():
    training = trainer()
    training.run_step()
    content, tensors = training.content, training.tensors()
    served = PEagleHead(HeadReader(content, renamed(StateDict(tensors), canonical_name), chat_model()))
    (text,) = learned(1)
    observed = training._observer.observe([text])
    features = [observed.features[name][0].float() for name in served.needs]
    normed = training._head().normed(training._head().fuse([rows.to(chat_model().model.dtype) for rows in features]))
    expected = normed.float() @ tensors["lm_head.weight"].T
    found = served.logits(served.fuse(features))
    torch.testing.assert_close(found, expected.detach(), rtol=0.1, atol=0.05 * expected.abs().max().item())


@pytest.mark.parametrize("name", ["num_steps", "batch_tokens", "num_passes", "learning_rate"])
def test_settings_out_of_range_are_refused(name):
    with pytest.raises(ConfigError, match=f"{name}: got 0; must be above 0"):
        Eagle3TrainSettings(**({"num_steps": 1} | {name: 0}))
