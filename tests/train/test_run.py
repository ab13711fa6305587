"""A whole run gives a head that drafts; interrupted in any stage it goes on, and mistakes are said before anything runs."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from forerun import LLM, SamplingParams
from forerun.errors import ConfigError, ModelError, RequestError
from forerun.models.heads.eagle3 import load_eagle3
from forerun.models.tokenizer import Tokenizer
from forerun.train import estimates, kept_files
from forerun.train.copied_block import begin_from_block
from forerun.train.packaging import save_head
from forerun.train.run import TrainingRun
from forerun.train.run_folder import texts_of_run
from forerun.train.run_settings import RunSettings
from forerun.train.texts import read_texts
from forerun.train.writing import WritingLimits
from tests.native import needs_kernels
from tests.tiny_models import save_tiny_model
from tests.tiny_tokenizer import save_tiny_tokenizer
from tests.train.target_folder import chat_model, chat_model_folder


class TornDownError(Exception):
    """Stands for whatever interrupts a run."""


@pytest.fixture(autouse=True)
def few_steps(monkeypatch):
    """Lets a run be shorter than any that is worth its time."""
    monkeypatch.setattr(estimates, "LEAST_STEPS", 3)


def settings(tmp_path, *, count=64, **changes):
    path = tmp_path / "prompts.jsonl"
    lines = [{"prompt": f"Question {number}?"} for number in range(count)]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    defaults = {"prompts": path, "epochs": 3.0, "draft_vocab_size": 240, "learning_rate": 1e-3}
    return RunSettings(model=str(chat_model_folder()), output=tmp_path / "head", **(defaults | changes))


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def stop_in(stage):
    def report(found):
        if found.stage == stage:
            raise TornDownError

    return report


@needs_kernels
def test_a_run_that_is_interrupted_in_each_stage_ends_in_a_head_that_drafts(tmp_path):
    excluded = tmp_path / "evaluation.txt"
    excluded.write_text("one two three four five six seven eight nine")
    asked = settings(tmp_path, count=32, epochs=2.0, exclude=(excluded,), verifier="org/name")
    for stage in ("write", "mask", "train", "measure", "package"):
        with pytest.raises(TornDownError):
            TrainingRun(asked, stop_in(stage)).go()
    measured = TrainingRun(asked, lambda found: None).go()
    assert [one.temperature for one in measured.at] == [0.0, 1.0]
    assert measured.speed_up is not None
    card = (tmp_path / "head" / "README.md").read_text()
    assert card.startswith("# EAGLE-3 head for")
    assert f"| prompts | a file (digest {digest(asked.prompts)}) |" in card
    assert f"| excluded | evaluation.txt (digest {digest(excluded)}) |" in card
    assert f"| digest of the texts | {digest(tmp_path / 'head' / 'training' / 'texts.bin')} |" in card
    assert " --exclude evaluation.txt " in card
    assert " --verifier org/name " in card
    written = json.loads((tmp_path / "head" / "config.json").read_text())
    assert written["speculators_config"]["verifier"]["name_or_path"] == "org/name"
    config = {"method": "eagle3", "model": str(tmp_path / "head"), "num_speculative_tokens": 3}
    drafting, plain = (LLM(str(chat_model_folder()), max_model_len=128, speculative_config=c) for c in (config, None))
    params = SamplingParams(temperature=1.0, seed=0, max_tokens=40)
    texts = [llm.generate([[5, 6, 7]], params, use_tqdm=False)[0].outputs[0].token_ids for llm in (drafting, plain)]
    assert texts[0] == texts[1]
    assert drafting.stats.speculation.num_draft_tokens > 0


def _are_equal(tensors, others):
    return tensors.keys() == others.keys() and all(torch.equal(one, others[name]) for name, one in tensors.items())


@needs_kernels
def test_a_head_is_trained_further_with_its_vocabulary_and_may_be_stored_in_int8(tmp_path):
    first = settings(tmp_path, count=20, epochs=2.0, stored_as="int8")
    TrainingRun(first, lambda found: None).go()
    config = json.loads((first.output / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    packaged = load_file(first.output / "model.safetensors")
    measured = [load_file(path) for path in (first.output / "training" / "heads").glob("*/model.safetensors")]
    assert any(_are_equal(packaged, one) for one in measured), "another head was measured than is packaged"
    second = replace(first, begin_with=first.output, output=tmp_path / "second", seed=3, draft_vocab_size=100)
    run = TrainingRun(second, lambda found: None)
    assert run.estimate(seconds=0.2).length is None, "it has learnt before"
    run.go()
    heads = [load_eagle3(folder, run.target) for folder in (first.output, second.output)]
    assert heads[0].target_ids.equal(heads[1].target_ids)
    assert run.folder.measured[0].num_tokens == 0, "the head that was begun with might be better"
    card = (second.output / "README.md").read_text()
    assert "--begin-with head" in card
    assert "| begun with | the head " in card


@needs_kernels
def test_a_head_without_induction_heads_is_measured_as_it_was_given(tmp_path):
    first = tmp_path / "first"
    begun = begin_from_block(chat_model(), torch.arange(1, 264), seed=0)
    save_head(first, *begun, layout="speculators", target=chat_model_folder())
    run = TrainingRun(settings(tmp_path, count=20, epochs=2.0, begin_with=first), stop_in("train"))
    with pytest.raises(TornDownError):
        run.go()
    assert _are_equal(*(load_file(folder / "model.safetensors") for folder in (first, run.folder.head(0))))


@needs_kernels
def test_features_that_are_kept_change_no_bit_of_the_head_and_are_thrown_away(tmp_path):
    heads = []
    for keep in (False, True):
        asked = replace(settings(tmp_path, count=20, epochs=2.0), keep_features=keep, output=tmp_path / str(keep))
        with pytest.raises(TornDownError):
            TrainingRun(asked, stop_in("mask")).go()
        assert (asked.output / "training" / "features").exists() is keep
        with pytest.raises(TornDownError):
            TrainingRun(asked, stop_in("measure")).go()
        assert not (asked.output / "training" / "features").exists()
        heads.append(load_file(asked.output / "training" / "state.safetensors"))
    assert heads[0].keys() == heads[1].keys()
    assert all(torch.equal(tensor, heads[1][name]) for name, tensor in heads[0].items())


@needs_kernels
def test_features_that_a_kill_left_are_thrown_away_by_the_next_start(tmp_path, monkeypatch):
    asked = settings(tmp_path, count=20, epochs=2.0, keep_features=True)

    def killed(folder, **options):
        if str(folder).endswith("features"):
            raise TornDownError

    with monkeypatch.context() as patch:
        patch.setattr("forerun.train.run.shutil.rmtree", killed)
        with pytest.raises(TornDownError):
            TrainingRun(asked, lambda found: None).go()
    assert (asked.output / "training" / "features").exists()
    with pytest.raises(TornDownError):
        TrainingRun(asked, stop_in("measure")).go()
    assert not (asked.output / "training" / "features").exists()


@needs_kernels
def test_a_training_that_is_interrupted_after_each_step_ends_in_the_same_head_and_says_how_far_it_is(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("forerun.train.run.SECONDS_PER_SAVE", 0.0)
    asked = settings(tmp_path, count=20, epochs=2.0)
    with pytest.raises(TornDownError):
        TrainingRun(asked, stop_in("mask")).go()
    whole, pieces = (replace(asked, prompts=None, texts=(asked.output,), output=tmp_path / name) for name in "ab")
    with pytest.raises(TornDownError):
        TrainingRun(whole, stop_in("measure")).go()
    notes = []

    def after_one_step(found):
        if found.stage == "measure" or (found.stage == "train" and found.done > len(notes) + 1):
            raise TornDownError
        if found.stage == "train":
            notes.append(found.note)

    run = TrainingRun(pieces, after_one_step)
    while not run.folder.is_done("train"):
        (run.folder.compared / "left").mkdir(parents=True)  # as a kill leaves it
        with pytest.raises(TornDownError):
            run.go()
        assert not run.folder.compared.exists()
        run = TrainingRun(pieces, after_one_step)
    assert len(notes) == run.folder.progress.num_steps > 3
    assert not [note for note in notes if "M tokens, " not in note or note.startswith(",")]
    found, expected = (load_file(one.output / "training" / "state.safetensors") for one in (pieces, whole))
    torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-6)  # a step moves weights by 1e-3
    assert run.folder.saved_steps() == TrainingRun(whole, lambda found: None).folder.saved_steps()


@needs_kernels
@pytest.mark.parametrize("architecture", ["Olmo2ForCausalLM", "MixtralForCausalLM"])
def test_a_model_with_other_blocks_is_refused_before_there_is_a_folder(tmp_path, architecture):
    folder = save_tiny_model(tmp_path / "other", architecture, vocab_size=264, max_position_embeddings=1024)
    save_tiny_tokenizer(folder, vocab_size=264)
    asked = replace(settings(tmp_path), model=str(folder))
    with pytest.raises(ConfigError, match="begins from blocks like Llama's, this model has others"):
        TrainingRun(asked, lambda found: None)
    assert not asked.output.exists()


@needs_kernels
def test_a_head_is_trained_on_what_a_server_kept(tmp_path):
    pools = tmp_path / "pools"
    config = {"method": "auto", "auto_memory": 100}
    llm = LLM(str(chat_model_folder()), max_model_len=128, speculative_config=config, pools_folder=str(pools))
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=60, ignore_eos=True)
    llm.generate([[5, 6, number] for number in range(70)], params, use_tqdm=False)
    llm.executor.pools.save()
    run = TrainingRun(settings(tmp_path, prompts=None, from_pool=pools), lambda found: None)
    measured = run.go()
    assert measured.num_tokens > 3000
    assert "those of a server's users" in (tmp_path / "head" / "README.md").read_text()
    again = replace(run.settings, from_pool=None, texts=(run.settings.output,), output=tmp_path / "again")
    TrainingRun(again, lambda found: None).take_texts()
    for folder in (run.settings.output, again.output):
        assert not (folder / "training").stat().st_mode & 0o077, "a pool may be read by its owner only"


@pytest.mark.slow
@needs_kernels
def test_a_disk_that_is_full_whenever_tensors_are_written_costs_no_more_than_going_on(tmp_path, monkeypatch):
    asked = settings(tmp_path, count=20, epochs=2.0)
    save = kept_files.save_tensors

    def full_at(number):
        calls = itertools.count()

        def written(tensors, path, *, metadata):
            if next(calls) == number:
                path.write_bytes(b"a part")
                raise OSError(28, "No space left on device")
            save(tensors, path, metadata=metadata)

        return written

    for number in range(5):  # the head that is compared, three that are kept, the state
        monkeypatch.setattr(kept_files, "save_tensors", full_at(number))
        with pytest.raises(ConfigError, match=r"No space left on device.*; make room"):
            TrainingRun(asked, lambda found: None).go()
    monkeypatch.setattr(kept_files, "save_tensors", save)
    with pytest.raises(TornDownError):
        TrainingRun(asked, stop_in("measure")).go()
    run = TrainingRun(asked, lambda found: None)
    assert len(run.folder.saved_steps()) == 3
    for step in run.folder.saved_steps():
        load_eagle3(run.folder.head(step), run.target)
        assert run._tokens_at(step) > 0
    assert not list(run.folder.work.rglob("*.unfinished"))


def test_without_kernels_a_run_ends_in_a_head_that_drafts(tmp_path, monkeypatch):
    monkeypatch.setattr("forerun.build.load_kernels", lambda: None)
    asked = settings(tmp_path, count=20, epochs=2.0)
    run = TrainingRun(asked, lambda found: None)
    assert run.target.kernels is None
    assert run.target.model.device.type == "cpu"
    measured = run.go()
    assert all(one.num_steps > 0 for one in measured.at)
    head = load_eagle3(asked.output, run.target)
    assert head.chains is None


@pytest.mark.parametrize(
    ("device", "message"), [("cuda:99", "device: got 'cuda:99', but"), ("tpu", "may be auto, cpu, cuda")]
)
def test_a_device_that_is_not_there_is_refused_before_there_is_a_folder(tmp_path, device, message):
    asked = settings(tmp_path, device=device)
    with pytest.raises(ConfigError, match=message):
        TrainingRun(asked, lambda found: None)
    assert not asked.output.exists()


@needs_kernels
def test_a_head_that_drafts_otherwise_than_it_is_trained_is_not_trained(tmp_path, monkeypatch):
    def swapped(folder, target):
        head = load_eagle3(folder, target)
        head.needs = head.needs[::-1]
        return head

    monkeypatch.setattr("forerun.train.served_head.load_eagle3", swapped)
    run = TrainingRun(settings(tmp_path), lambda found: None)
    with pytest.raises(ConfigError, match="the engine's logits and the trainer's differ"):
        run.go()
    assert not run.folder.state.exists()
    assert run.folder.saved_steps() == []


@needs_kernels
def test_a_head_of_another_kind_is_not_trained_further(tmp_path):
    with pytest.raises(ModelError, match=r"config.json"):
        TrainingRun(settings(tmp_path, begin_with=tmp_path), lambda found: None)


@needs_kernels
def test_a_model_whose_template_leaves_no_room_is_refused_before_there_is_a_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("forerun.train.run.WritingLimits", lambda: WritingLimits(most_conversation=16))
    asked = settings(tmp_path, prompts=None, budget=200.0)
    with pytest.raises(ConfigError, match=r"may have 16 tokens, of which its chat template takes \d+"):
        TrainingRun(asked, lambda found: None)
    assert not asked.output.exists()


@needs_kernels
def test_system_messages_that_a_template_refuses_are_refused_before_there_is_a_folder(tmp_path, monkeypatch):
    asked = settings(tmp_path, prompts=tmp_path / "messages.jsonl")
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi?"}]
    asked.prompts.write_text('{"prompt": "Hi?"}\n' + json.dumps({"messages": messages}))
    render_chat = Tokenizer.render_chat

    def without_system(self, messages, **options):
        if messages[0]["role"] == "system":
            raise RequestError("messages: the chat template refuses them")
        return render_chat(self, messages, **options)

    monkeypatch.setattr(Tokenizer, "render_chat", without_system)
    with pytest.raises(ConfigError, match="--prompts: has system messages, which this model does not take"):
        TrainingRun(asked, lambda found: None)
    assert not asked.output.exists()


@needs_kernels
def test_a_folder_of_another_run_is_refused(tmp_path):
    TrainingRun(settings(tmp_path), lambda found: None)
    with pytest.raises(ConfigError, match="seed 0 instead of 1; give the same command to go on"):
        TrainingRun(settings(tmp_path, seed=1), lambda found: None)


@needs_kernels
def test_a_head_is_not_stored_in_another_way_on_the_way(tmp_path):
    TrainingRun(settings(tmp_path), lambda found: None)
    with pytest.raises(ConfigError, match="is of a run with stored_as 'bf16' instead of 'int8'"):
        TrainingRun(settings(tmp_path, stored_as="int8"), lambda found: None)


@needs_kernels
@pytest.mark.parametrize("option", ["prompts", "exclude"])
def test_a_folder_whose_files_have_changed_is_refused(tmp_path, option):
    excluded = tmp_path / "excluded.txt"
    excluded.write_text("one two three four five six seven eight nine")
    asked = settings(tmp_path, exclude=(excluded,))
    TrainingRun(asked, lambda found: None)
    changed = asked.prompts if option == "prompts" else excluded
    changed.write_text(changed.read_text() + '\n{"prompt": "Another?"}\n')
    with pytest.raises(ConfigError, match=f"is of a run with {option} "):
        TrainingRun(asked, lambda found: None)


@needs_kernels
def test_texts_of_another_run_are_trained_on_and_what_was_planned_stays(tmp_path):
    first = settings(tmp_path)
    with pytest.raises(TornDownError):
        TrainingRun(first, stop_in("mask")).go()
    asked = replace(first, prompts=None, texts=(first.output,), output=tmp_path / "second", seed=5, epochs=2.5)
    with pytest.raises(TornDownError):
        TrainingRun(asked, stop_in("train")).go()
    written = [folder / "training" / "texts.bin" for folder in (first.output, asked.output)]
    assert written[0].read_bytes() == written[1].read_bytes()
    third = replace(asked, texts=(asked.output,), output=tmp_path / "third")
    TrainingRun(third, lambda found: None).take_texts()
    for one in (asked, third):
        assert TrainingRun(one, lambda found: None)._origin() == f"a file (digest {digest(first.prompts)})"
    both = TrainingRun(replace(asked, texts=(first.output, asked.output), output=tmp_path / "both"), lambda found: None)
    both.take_texts()
    texts, twice = (read_texts(path) for path in (written[0], both.folder.texts))
    last = max(text.number for text in texts)
    assert [text.number for text in twice] == [
        *(text.number for text in texts),
        *(last + 1 + text.number for text in texts),
    ]
    TrainingRun(asked, lambda found: None)
    with pytest.raises(ConfigError, match=r"--epochs: got 20.0, but the \d+ steps .* were planned for 2.5"):
        TrainingRun(replace(asked, epochs=20.0), lambda found: None)


@needs_kernels
def test_texts_of_another_run_are_read_once(tmp_path, monkeypatch):
    first = settings(tmp_path)
    with pytest.raises(TornDownError):
        TrainingRun(first, stop_in("mask")).go()
    read = []

    def counted(source, fingerprint):
        read.append(source)
        return texts_of_run(source, fingerprint)

    monkeypatch.setattr("forerun.train.run.texts_of_run", counted)
    asked = replace(first, prompts=None, texts=(first.output,), output=tmp_path / "second")
    for _ in range(2):
        with pytest.raises(TornDownError):
            TrainingRun(asked, stop_in("mask")).go()
    assert read == [first.output]


@needs_kernels
def test_texts_that_were_taken_stay_when_another_estimate_is_made(tmp_path):
    first = settings(tmp_path)
    with pytest.raises(TornDownError):
        TrainingRun(first, stop_in("mask")).go()
    asked = replace(first, prompts=None, texts=(first.output,), output=tmp_path / "second")
    run = TrainingRun(asked, lambda found: None)
    run.estimate(seconds=0.2)
    taken = run.folder.texts.read_bytes()
    first.output.rename(tmp_path / "elsewhere")
    again = TrainingRun(replace(asked, epochs=2.0), lambda found: None)
    assert not again.is_estimated
    again.estimate(seconds=0.2)
    assert again.folder.texts.read_bytes() == taken
    assert again.folder.progress.done == ["write"]


@needs_kernels
def test_the_card_names_the_origins_of_the_texts_of_all_runs_that_were_taken(tmp_path):
    folders = []
    for prompts in ("One?", "Two?"):
        path = tmp_path / f"{prompts}.txt"
        path.write_text(f"{prompts}\n" * 20)
        asked = replace(settings(tmp_path, prompts=path), output=tmp_path / prompts)
        run = TrainingRun(asked, lambda found: None)
        run.write()
        folders.append((run.settings.output, f"a file (digest {digest(path)})"))
    outputs, origins = zip(*folders, strict=True)
    both = TrainingRun(settings(tmp_path, prompts=None, texts=outputs), lambda found: None)
    both.take_texts()
    assert both._origin() == ", ".join(origins)
    again = replace(both.settings, texts=(both.settings.output, outputs[0]), output=tmp_path / "again")
    run = TrainingRun(again, lambda found: None)
    run.take_texts()
    assert run._origin() == ", ".join(origins)


@needs_kernels
def test_texts_that_are_not_there_are_refused_before_there_is_a_folder(tmp_path):
    asked = settings(tmp_path, prompts=None, texts=(tmp_path,))
    with pytest.raises(ConfigError, match="holds no texts of a training run"):
        TrainingRun(asked, lambda found: None)
    with pytest.raises(ConfigError, match=r"--from-pool: .*there is no such file"):
        TrainingRun(replace(asked, texts=(), from_pool=tmp_path / "missing"), lambda found: None)
    assert not asked.output.exists()


@needs_kernels
def test_a_run_that_is_too_short_is_refused_by_its_estimate(tmp_path):
    run = TrainingRun(settings(tmp_path, epochs=0.15), lambda found: None)
    with pytest.raises(ConfigError, match="at least 3 of 2048 tokens are needed"):
        run.estimate(seconds=0.2)
    assert "train" not in run.folder.progress.seconds
    assert not run.is_estimated


@needs_kernels
def test_too_few_conversations_however_long_are_refused_before_there_is_a_folder(tmp_path):
    asked = settings(tmp_path, epochs=0.01)
    with pytest.raises(ConfigError, match=r"comes to 655 tokens.* at least 3 of 2048 tokens are needed"):
        TrainingRun(asked, lambda found: None)
    assert not asked.output.exists()


@needs_kernels
def test_a_budget_in_which_nothing_can_be_trained_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(estimates, "LEAST_STEPS", 10**6)
    run = TrainingRun(settings(tmp_path, budget=130.0, epochs=None, prompts=None), lambda found: None)
    with pytest.raises(ConfigError, match="at least 1000000 of 2048 tokens are needed"):
        run.estimate(seconds=0.2)
    assert not run.folder.texts.exists()


@needs_kernels
def test_one_usable_conversation_is_refused_by_the_estimate_and_before_training(tmp_path):
    path = tmp_path / "same.txt"
    path.write_text("Same?\n" * 20)
    asked = settings(tmp_path, prompts=path)
    message = r"one is left to learn from \(20 written, \d+ without an answer, \d+ repeated.* and none to measure"
    with pytest.raises(ConfigError, match=message):
        TrainingRun(asked, lambda found: None).estimate(seconds=0.2)
    with pytest.raises(ConfigError, match=message):
        TrainingRun(asked, lambda found: None).go()
    assert "train" not in TrainingRun(asked, lambda found: None).folder.progress.seconds


@needs_kernels
def test_an_estimate_refuses_prompts_that_are_all_excluded(tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"one two three four five six seven eight {number}\n" for number in range(20)))
    run = TrainingRun(settings(tmp_path, prompts=prompts, exclude=(prompts,)), lambda found: None)
    with pytest.raises(ConfigError, match=r"none is left to learn from .* \d+ excluded"):
        run.estimate(seconds=0.2)


@needs_kernels
def test_an_estimate_knows_what_is_written_and_is_noted_with_its_time(tmp_path):
    asked = settings(tmp_path)
    run = TrainingRun(asked, lambda found: None)
    assert not run.is_estimated
    estimate = run.estimate(seconds=0.2)
    assert estimate.num_trained > 3.0 * estimate.num_written  # questions are computed too
    assert estimate.memory_bytes > 50e6
    assert estimate.measure_seconds > 0
    assert run.folder.progress.seconds["estimate"] > 0
    assert TrainingRun(asked, lambda found: None).is_estimated
    assert not TrainingRun(replace(asked, epochs=2.0), lambda found: None).is_estimated


@needs_kernels
def test_an_estimate_counts_conversations_that_come_to_nothing(tmp_path):
    asked = settings(tmp_path, count=16)
    with asked.prompts.open("a") as file:
        file.writelines(json.dumps({"prompt": "too long " * 600 + str(number)}) + "\n" for number in range(48))
    run = TrainingRun(asked, lambda found: None)
    estimate = run.estimate(seconds=600.0)
    texts = read_texts(run.folder.texts)
    assert sum(not text.spans for text in texts) >= 48
    assert estimate.num_written == pytest.approx(sum(text.num_written for text in texts))


@needs_kernels
def test_a_folder_with_something_else_is_left_alone(tmp_path):
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "mine").write_text("x")
    with pytest.raises(ConfigError, match="is no folder of a training run"):
        TrainingRun(settings(tmp_path), lambda found: None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "medusa"}, "--method: got 'medusa'"),
        ({"layout": "x"}, "--layout: got 'x'"),
        (
            {"layout": "specforge", "verifier": "org/name"},
            "--verifier: got 'org/name', but only the layout of speculators",
        ),
        ({"magpie": 5}, "--prompts and --magpie are both given"),
        ({"texts": Path("x")}, "--prompts and --texts are both given"),
        ({"epochs": None}, "--budget: is missing"),
        ({"epochs": 0.0}, "--epochs: got 0"),
        ({"epochs": math.inf}, "--epochs: got inf; must be above 0 and finite"),
        ({"epochs": math.nan}, "--epochs: got nan"),
        ({"learning_rate": 0.0}, "--learning-rate: got 0; must be above 0 and finite"),
        ({"draft_vocab_size": 0}, "--draft-vocab-size: got 0; must be at least 1"),
        ({"seed": 1 << 32}, "--seed: got 4294967296; must be from 0 to 4294967295"),
        ({"prompts": None}, "without --budget say how many"),
        ({"budget": 5.0}, "in which nothing can be trained"),
    ],
)
def test_settings_that_do_not_fit_are_refused(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        settings(tmp_path, **changes)


def test_the_command_of_a_long_budget_can_be_given_again(tmp_path):
    asked = settings(tmp_path, budget=14 * 86400.0)
    assert " --budget 1209600s " in asked.command()
