"""One training run from nothing but a model to a head: five stages, each of which can be interrupted and goes on."""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forerun import __version__
from forerun.build import load_target
from forerun.config.settings import EngineSettings
from forerun.config.speculative_config import SpeculativeConfig
from forerun.drafters.pool_files import ModelIdentity
from forerun.errors import ConfigError, RequestError
from forerun.executor.host_copies import free_bytes
from forerun.llm import LLM
from forerun.models.download import sha256_of
from forerun.models.heads.eagle3 import NUM_INDUCTION_HEADS, read_flags
from forerun.models.store import hub_id, resolve_model
from forerun.models.tokenizer import Tokenizer
from forerun.train.batches import Batches
from forerun.train.conversations import ChatMarks, InventedConversations, Plans, read_conversations
from forerun.train.copied_block import begin_from_block, check_block
from forerun.train.eagle3_trainer import PASS_TOKENS, TAUGHT_STEPS, Eagle3Trainer, Eagle3TrainSettings
from forerun.train.estimates import Estimate, Rates, count_steps, plan_tokens
from forerun.train.induction_heads import add_induction_heads
from forerun.train.initial_weights import feature_layers
from forerun.train.kept_features import FeaturesInMemory, KeptFeatures
from forerun.train.kept_files import write_text
from forerun.train.measuring import Measurement, measure_head, measure_times
from forerun.train.observer import LAST
from forerun.train.packaging import model_card, save_head
from forerun.train.pooled_texts import read_pooled_texts
from forerun.train.probing import WritingPace, measuring_seconds, peak_memory, quick_texts, training_rate
from forerun.train.run_folder import RunFolder, is_begun, read_origins, texts_of_run
from forerun.train.run_settings import RunSettings, is_from_pool, origin_of
from forerun.train.selection import LearnedText, Selection, prompt_of, read_excluded, select, whole_text
from forerun.train.served_head import check_served_head
from forerun.train.stage_clock import StageClock
from forerun.train.target import BLOCK_SIZE
from forerun.train.texts import TextFile, WrittenText
from forerun.train.trained_head import begin_from_head, draft_ids_of
from forerun.train.writing import LEAST_ANSWER, LEAST_QUESTION, NUM_AT_ONCE, WritingLimits, write_texts

WRITE_SHARE, TRAIN_SHARE = 0.35, 0.58
"""Shares of the time budget; the rest is for measuring."""

MOST_EPOCHS = 8.0
KEPT_SHARE = 0.5  # of a GPU's free memory, for hidden states of texts
SECONDS_PER_SAVE = 120.0
HEADS_KEPT_AT = (0.5, 0.75, 1.0)  # of the steps
CURVE_AT = (1e6, 3e6, 1e7, 3e7, 1e8)  # tokens trained on, after which a head is kept too
NUM_MEASURED = 64  # held-out conversations


@dataclass(frozen=True, slots=True, kw_only=True)
class StageReport:
    """How far a stage is: `done` of `total` (None: unknown), and one phrase on how it goes."""

    stage: str
    done: float
    total: float | None
    note: str = ""


Report = Callable[[StageReport], None]


class TrainingRun:
    """The stages of a run over its folder; `go` runs those that are not complete."""

    def __init__(self, settings: RunSettings, report: Report) -> None:
        """Load the target and open the folder.

        Raises:
            ForerunError: the model, the prompts or the folder cannot be used; nothing has been run then.
        """
        self.settings, self._report = settings, report
        path = self._path = resolve_model(settings.model)
        limits = WritingLimits()
        self._engine = EngineSettings(
            model=settings.model,
            device=settings.device,
            max_model_len=limits.most_conversation,
            # so that no share of a GPU must be free when the target is loaded
            num_gpu_blocks_override=_num_blocks(limits),
        )
        device = self._engine.torch_device
        if device.type != "cpu":
            self._engine = replace(self._engine, dtype="bfloat16")  # fp16 has too narrow a range for gradients
        self._excluded = read_excluded(settings.exclude)
        self.plans: Plans = (
            InventedConversations(count=settings.magpie, seed=settings.seed)
            if settings.prompts is None
            else read_conversations(settings.prompts)
        )
        self.target = load_target(path, self._engine, device)
        self._limits = replace(
            limits,
            most_conversation=min(limits.most_conversation, self.target.model.max_model_len),
            num_at_once=NUM_AT_ONCE[device.type],
        )
        self._engine = replace(
            self._engine,
            max_model_len=self._limits.most_conversation,
            max_num_seqs=self._limits.num_at_once,
            num_gpu_blocks_override=_num_blocks(self._limits),
        )
        self._check_room(ChatMarks.read(self.tokenizer))
        if self.plans.system is not None:
            try:
                ChatMarks.read(self.tokenizer, system=self.plans.system)
            except RequestError as error:
                raise ConfigError(
                    f"--prompts: has system messages, which this model does not take ({error}); leave them out"
                ) from None
        if self.plans.count is not None:  # too few even if each conversation were as long as it may be
            most = self.plans.count * self._limits.most_conversation * (settings.epochs or MOST_EPOCHS)
            count_steps(most, settings.batch_tokens)
        self._begun = None if settings.begin_with is None else begin_from_head(settings.begin_with, self.target)
        if self._begun is None:
            check_block(self.target)
        self._identity = settings.identity(path, chat_template=self.tokenizer.chat_template)
        # before there is a folder: one without texts would hold back the right command
        self._sources = None if is_begun(settings.output) else self._read_sources()
        self.folder = RunFolder(settings.output, self._identity)
        self.folder.check_extent(settings.extent())

    @property
    def tokenizer(self) -> Tokenizer:
        """The target's."""
        if self.target.tokenizer is None:
            raise ConfigError("model: has no tokenizer; give a chat model")
        return self.target.tokenizer

    def go(self) -> Measurement:
        """Run the stages that are not complete and return the best head's measurement."""
        if not self.folder.is_done("write"):
            if self._takes_texts:
                self.take_texts()
            else:
                self.write()
        selection = self.mask()
        if not self.folder.is_done("train"):
            self.train(selection)
        if not self.folder.is_done("measure"):
            self.measure(selection)
        return self.package(selection)

    def write(self, *, most_seconds: float | None = None) -> WritingPace:
        """Let the target write texts until all conversations are had or the time is up; return how fast it did."""
        settings = self.settings
        share = None if settings.budget is None else WRITE_SHARE * settings.budget
        allowed = min((s for s in (most_seconds, share) if s is not None), default=None)
        clock, pace = StageClock(self.folder, "write"), WritingPace()
        kept = self._kept()
        speculative = SpeculativeConfig() if kept is None else kept.written_by_engine()
        llm = LLM.from_target(self.target, self._engine, speculative)

        with clock, TextFile(self.folder.texts) as file:
            before = file.num_written

            def goes_on(num_running: int) -> bool:
                seconds = clock.tick()
                if num_running == self._limits.num_at_once:
                    pace.note(seconds, llm.stats.num_generation_tokens)
                llm.engine.wait_for_files()
                is_timed = allowed is not None
                self._report(
                    StageReport(
                        stage="write",
                        done=min(seconds, allowed or seconds) if is_timed else len(file.texts),
                        total=allowed if is_timed else self.plans.count,
                        note=f"{len(file.texts)} conversations, {file.num_written / 1e6:.2f}M tokens of answers",
                    )
                )
                return allowed is None or seconds < allowed

            write_texts(
                llm.engine,
                self.tokenizer,
                self.plans,
                file,
                seed=settings.seed,
                limits=self._limits,
                goes_on=goes_on,
                kept=kept,
            )
            pace.num_generated, pace.num_answers = llm.stats.num_generation_tokens, file.num_written - before
        if most_seconds is None:
            self.folder.finish("write")
        return pace

    def take_texts(self) -> None:
        """Take the texts that other runs have written so far, or those that a server has kept.

        Raises:
            ConfigError: there are none, or they are of another model, or others could read what users were answered.
        """
        sources, self._sources = self._sources or self._read_sources(), None  # they are not kept in memory
        origins: list[dict[str, Any]] = []
        for _, writers in sources:
            origins += [writer for writer in writers if writer not in origins]
        if any(map(is_from_pool, origins or [self._identity])):
            self.folder.keep_private()
        self.folder.texts.unlink(missing_ok=True)
        with TextFile(self.folder.texts) as file:
            for texts, _ in sources:
                first = 1 + max((text.number for text in file.texts), default=-1)
                for text in texts:
                    file.append(replace(text, number=first + text.number))
        write_text(self.folder.origins, json.dumps(origins, indent=2) + "\n")
        self.folder.finish("write")

    def _read_sources(self) -> list[tuple[list[WrittenText], list[dict[str, Any]]]]:
        """Read the texts that other runs have written so far, each with the settings of those that did, or a server's."""
        fingerprint = self._identity["fingerprint"]
        if self.settings.from_pool is None:
            return [texts_of_run(source, fingerprint) for source in self.settings.texts]
        model = ModelIdentity(fingerprint=fingerprint, name=self.settings.model)
        most = self._limits.most_conversation
        return [(read_pooled_texts(self.settings.from_pool, model, most_tokens=most), [])]

    def mask(self) -> Selection:
        """Select what is learnt of the texts; it takes seconds, so it is done anew each time."""
        with TextFile(self.folder.texts) as file:
            selection = self._select(file.texts)
        note = (
            f"{len(selection.learned)} conversations, {selection.num_places / 1e6:.2f}M places to learn, draft vocabulary "
            f"covers {selection.coverage:.1%}; left out: {selection.num_empty} empty, {selection.num_repeated} repeated, "
            f"{selection.num_excluded} excluded"
        )
        self._report(StageReport(stage="mask", done=1, total=1, note=note))
        return selection

    def train(self, selection: Selection) -> None:
        """Train the head, and keep it at several places on the way."""
        clock = StageClock(self.folder, "train")
        progress = self.folder.progress
        with clock:
            if progress.num_steps is None:
                progress.num_steps, progress.extent = self._plan_steps(selection), self.settings.extent()
                self.folder.save()
            trainer = self.trainer(selection, num_steps=progress.num_steps)
            if self.folder.state.exists():
                trainer.resume(self.folder.state)
            elif self._begun is not None:
                self._keep(0, *self._begun, num_tokens=0)  # it is measured too: training further may make it worse
            self._store(self.folder.compared, trainer.content, trainer.tensors())
            check_served_head(trainer, self.folder.compared, self.target, selection.learned[0])
            shutil.rmtree(self.folder.compared, ignore_errors=True)
            kept_at = {max(1, round(share * progress.num_steps)) for share in HEADS_KEPT_AT}
            curve = [num_tokens for num_tokens in CURVE_AT if num_tokens > trainer.num_tokens]
            saved = time.monotonic()
            note = f"{trainer.num_tokens / 1e6:.2f}M tokens"
            while trainer.step < progress.num_steps:
                step = trainer.run_step()
                if step.agreement:
                    shares = " ".join(f"{share:.0%}" for share in step.agreement)
                    note = f"loss {step.loss:.2f}, same first choice {shares}, {trainer.num_tokens / 1e6:.2f}M tokens"
                seconds = clock.tick()
                rate = f"{trainer.num_tokens / seconds:.0f} tokens/s" if seconds else ""
                self._report(
                    StageReport(stage="train", done=trainer.step, total=progress.num_steps, note=f"{note}, {rate}")
                )
                is_on_curve = bool(curve) and trainer.num_tokens >= curve[0]
                if is_on_curve:
                    curve.pop(0)
                if is_on_curve or trainer.step in kept_at:
                    self._keep(trainer.step, trainer.content, trainer.tensors(), num_tokens=trainer.num_tokens)
                if time.monotonic() - saved > SECONDS_PER_SAVE or trainer.step == progress.num_steps:
                    trainer.save(self.folder.state)
                    clock.note()
                    saved = time.monotonic()
        shutil.rmtree(self.folder.features, ignore_errors=True)  # before it is noted that nobody will come here again
        self.folder.finish("train")

    def trainer(self, selection: Selection, *, num_steps: int) -> Eagle3Trainer:
        """A trainer at its beginning."""
        kept = self._kept() or self._kept_in_memory()
        return self._trainer(selection.learned, selection.draft_ids, num_steps=num_steps, kept=kept)

    def measure(self, selection: Selection) -> None:
        """Measure the heads that were kept, in the engine."""
        steps = self.folder.saved_steps()
        prompts = [text.token_ids[: text.spans[0][0]].tolist() for text in selection.held_out[:NUM_MEASURED]]
        with StageClock(self.folder, "measure"):
            for index, step in enumerate(steps):
                self._report(StageReport(stage="measure", done=index, total=len(steps), note=f"head of step {step}"))
                if str(step) in self.folder.progress.measured:
                    continue
                measured = measure_head(
                    self.target,
                    self.folder.head(step),
                    prompts,
                    settings=self._engine,
                    num_tokens=self._tokens_at(step),
                )
                self._note(step, measured)
            best = self.best_step()
            if self.folder.measured[best].speed_up is None:
                self._note(
                    best,
                    measure_times(
                        self.target,
                        self.folder.head(best),
                        prompts,
                        self.folder.measured[best],
                        settings=self._engine,
                    ),
                )
        self.folder.finish("measure")

    def best_step(self) -> int:
        """The step of the head with the largest measured acceptance length."""
        measured = self.folder.measured
        return max(measured, key=lambda step: (measured[step].length, step))

    def package(self, selection: Selection) -> Measurement:
        """Put the best head into the output folder."""
        best = self.best_step()
        measured = self.folder.measured[best]
        content, tensors = begin_from_head(self.folder.head(best), self.target)
        self._store(self.folder.output, content, tensors, stored_as=self.settings.stored_as)
        facts = {
            "target": f"{self.settings.model}, fingerprint {self._identity['fingerprint'][:16]}",
            "texts": f"{len(selection.learned)} of the target's own, {selection.num_places} tokens learnt",
            "prompts": self._origin(),
            "excluded": ", ".join(
                f"{path.name} (digest {digest})"
                for path, digest in zip(self.settings.exclude, self._identity["exclude"], strict=True)
            )
            or "nothing",
            "trained": f"{measured.num_tokens / 1e6:.2f}M tokens, {best} steps, seed {self.settings.seed}",
            "draft vocabulary": f"{len(selection.draft_ids)} tokens, {selection.coverage:.1%} of what is learnt",
            "digest of the texts": sha256_of(self.folder.texts)[:16],
            "versions": f"forerun {__version__}, torch {torch.__version__}",
        }
        if self.settings.begin_with is not None:
            facts["begun with"] = f"the head {sha256_of(self.settings.begin_with / 'model.safetensors')[:16]}"
        card = model_card(
            target=Path(self.settings.model).name,
            command=self.settings.command(),
            facts=facts,
            measured=measured,
            curve=sorted(self.folder.measured.values(), key=lambda one: one.num_tokens),
        )
        write_text(self.folder.output / "README.md", card)
        self._report(StageReport(stage="package", done=1, total=1, note=str(self.folder.output)))
        return measured

    def estimate(self, *, seconds: float = 20.0) -> Estimate:
        """Write and train for some seconds to say what the run will take; what is written is kept.

        Raises:
            ConfigError: what is asked for is too little to train anything, which is said before anything is written where
                that can be told from the budget alone.
        """
        if self.settings.budget is not None and not self.folder.is_done("write"):
            self._check_budget(self.settings.budget)
        writing = None
        if not self.folder.is_done("write"):
            if self._takes_texts:
                self.take_texts()
            else:
                spent = self.folder.progress.seconds.get("write", 0.0)
                writing = self.write(most_seconds=spent + seconds).answers_per_second
        with TextFile(self.folder.texts) as file:
            texts, num_written = file.texts, file.num_written
        selection = self._select(texts)
        kept, model = self._kept(), self.target.model
        prompts = [text.token_ids[: text.spans[0][0]].tolist() for text in texts if text.spans][:NUM_MEASURED]
        with StageClock(self.folder, "estimate"):
            training, num_weights = training_rate(self.trainer(selection, num_steps=1000))
            measuring, timing = measuring_seconds(
                LLM.from_target(self.target, self._engine, SpeculativeConfig()), prompts
            )
        rates = Rates(
            writing=writing or num_written / max(1.0, self.folder.progress.seconds.get("write", 0.0)),
            training=training,
            measuring=measuring,
            timing=timing,
            per_text=num_written / len(texts),
            overhead=sum(len(text.token_ids) for text in texts) / max(1, num_written),
            num_weights=num_weights,
            memory_bytes=peak_memory(),
            kept_bytes=0 if kept is None else len(kept.names) * model.hidden_size * model.dtype.itemsize,
        )
        estimate = Estimate.of(
            rates,
            budget=self.settings.budget,
            count=self.plans.count,
            epochs=self.settings.epochs,
            shares=(WRITE_SHARE, TRAIN_SHARE),
            most_epochs=MOST_EPOCHS,
            kept_at=[*[0.0] * (len(HEADS_KEPT_AT) + (self._begun is not None)), *CURVE_AT],
            num_written=num_written if self.folder.is_done("write") else None,
        )
        count_steps(estimate.num_trained, self.settings.batch_tokens)
        if self._begun is not None:
            estimate = replace(estimate, length=None)
        self.folder.progress.estimated = self.settings.extent()
        self.folder.save()
        return estimate

    @property
    def is_estimated(self) -> bool:
        """Whether an estimate has said that what is asked for comes to something, or training has begun since."""
        progress = self.folder.progress
        return progress.num_steps is not None or progress.estimated == self.settings.extent()

    def _plan_steps(self, selection: Selection) -> int:
        """How many steps are trained: the epochs asked for, as far as there is time for them."""
        settings = self.settings
        left, rate = math.inf, 1.0
        if settings.budget is not None:
            rate, _ = training_rate(self.trainer(selection, num_steps=1000))
            left = (WRITE_SHARE + TRAIN_SHARE) * settings.budget - sum(self.folder.progress.seconds.values())
        most_epochs = settings.epochs or MOST_EPOCHS
        num_trained = plan_tokens(selection.num_tokens, seconds=left, rate=rate, most_epochs=most_epochs)
        size = settings.batch_tokens
        batches = Batches(selection.learned, batch_tokens=size, pass_tokens=size, seed=settings.seed)
        return count_steps(num_trained, round(batches.mean_tokens))

    def _check_budget(self, budget: float) -> None:
        """Train for some steps on made-up texts, to see whether a budget can come to anything.

        Raises:
            ConfigError: it cannot.
        """
        model = self.target.model
        if self._draft_ids is None:
            draft_ids = np.arange(min(self.settings.draft_vocab_size, model.vocab_size))
        else:
            draft_ids = self._draft_ids
        texts = quick_texts(vocab_size=model.vocab_size, length=min(256, self._limits.most_conversation))
        with StageClock(self.folder, "estimate"):
            rate, _ = training_rate(self._trainer(texts, draft_ids, num_steps=1000, kept=None), num_steps=1)
        left = (WRITE_SHARE + TRAIN_SHARE) * budget - sum(self.folder.progress.seconds.values())
        count_steps(max(0.0, left) * rate, self.settings.batch_tokens)

    def _check_room(self, marks: ChatMarks) -> None:
        """Refuse a model whose chat template leaves no room for a question and an answer.

        Raises:
            ConfigError: it leaves none.
        """
        most = self._limits.most_conversation
        num_marks = len(self.tokenizer.encode(marks.begin + marks.answer, add_special_tokens=False))
        if most < num_marks + LEAST_QUESTION + LEAST_ANSWER:
            raise ConfigError(
                f"model: its conversations may have {most} tokens, of which its chat template takes {num_marks}; use another "
                "model"
            )

    def _select(self, texts: Sequence[WrittenText]) -> Selection:
        """Select what is learnt of texts, and what is held out.

        Raises:
            ConfigError: too little is left.
        """
        selection = select(
            texts,
            vocab_size=self.target.model.vocab_size,
            num_draft=self.settings.draft_vocab_size,
            always=self.target.eos_token_ids,
            draft_ids=self._draft_ids,
            tokenizer=self.tokenizer,
            excluded=self._excluded,
            known_by=whole_text if any(map(is_from_pool, self._writers)) else prompt_of,
        )
        if not selection.held_out:
            raise ConfigError(
                f"texts: one is left to learn from ({len(texts)} written, {selection.num_empty} without an answer, "
                f"{selection.num_repeated} repeated, {selection.num_excluded} excluded), and none to measure the head on; "
                "write more"
            )
        return selection

    def _trainer(
        self,
        texts: Sequence[LearnedText],
        draft_ids: NDArray[np.int64],
        *,
        num_steps: int,
        kept: KeptFeatures | FeaturesInMemory | None,
    ) -> Eagle3Trainer:
        ids, seed = torch.from_numpy(draft_ids), self.settings.seed
        begun = self._begun or begin_from_block(self.target, ids, seed=seed)
        embeddings = self.target.model.embed(ids.to(self.target.model.device)).cpu()
        content, tensors = add_induction_heads(*begun, embeddings, seed=seed)
        has_learnt_to_copy = self._begun is not None and NUM_INDUCTION_HEADS in self._begun[0]
        settings = Eagle3TrainSettings(
            num_steps=num_steps,
            taught_steps=0 if has_learnt_to_copy else TAUGHT_STEPS,
            batch_tokens=self.settings.batch_tokens,
            pass_tokens=PASS_TOKENS[self.target.model.device.type],
            learning_rate=self.settings.learning_rate,
            seed=seed,
        )
        return Eagle3Trainer(self.target, content, tensors, texts, settings, kept)

    def _origin(self) -> str:
        """Where the texts came from."""
        return ", ".join(dict.fromkeys(map(origin_of, self._writers)))

    @property
    def _writers(self) -> list[dict[str, Any]]:
        """The settings of the runs that wrote the texts."""
        return read_origins(self.folder.origins) or [self._identity]

    @property
    def _takes_texts(self) -> bool:
        """Whether texts are there, and none are written."""
        return bool(self.settings.texts) or self.settings.from_pool is not None

    @property
    def _verifier(self) -> str:
        """What vLLM loads as the target."""
        return self.settings.verifier or hub_id(self.settings.model) or str(self._path.resolve())

    @property
    def _draft_ids(self) -> NDArray[np.int64] | None:
        """The tokens that the head can draft, if one is trained further."""
        return None if self._begun is None else draft_ids_of(self._begun[1]).numpy()

    def _kept(self) -> KeptFeatures | None:
        """Where the target's hidden states are kept on disk, if they are."""
        return KeptFeatures(self.folder.features, self._features) if self.settings.keep_features else None

    def _kept_in_memory(self) -> FeaturesInMemory | None:
        """A GPU's memory, where the target's hidden states are kept as far as there is room."""
        free = free_bytes(self.target.model.device)
        return FeaturesInMemory(self._features, room=int(KEPT_SHARE * free)) if free else None

    @property
    def _features(self) -> list[str]:
        """The target's hidden states that are learnt from."""
        num_layers = self.target.model.num_layers
        if self._begun is None:
            layer_ids = feature_layers(num_layers)
        else:
            layer_ids = list(read_flags(self._begun[0], num_target_layers=num_layers).layer_ids)
        return [*(f"hidden.{layer}" for layer in layer_ids), LAST]

    def _keep(self, step: int, content: Mapping[str, Any], tensors: Mapping[str, Tensor], *, num_tokens: int) -> None:
        folder = self.folder.head(step)
        self._store(folder, content, tensors, stored_as=self.settings.stored_as)  # what is measured is what is packaged
        write_text(folder / "tokens.txt", f"{num_tokens}\n")

    def _store(
        self, folder: Path, content: Mapping[str, Any], tensors: Mapping[str, Tensor], *, stored_as: str = "bf16"
    ) -> None:
        save_head(
            folder,
            content,
            tensors,
            layout=self.settings.layout,
            target=self._path,
            stored_as=stored_as,
            verifier=self._verifier,
        )

    def _tokens_at(self, step: int) -> int:
        return int((self.folder.head(step) / "tokens.txt").read_text())

    def _note(self, step: int, measured: Measurement) -> None:
        self.folder.progress.measured[str(step)] = measured.to_json()
        self.folder.save()


def _num_blocks(limits: WritingLimits) -> int:
    """Blocks of KV: conversations are a third as long as they may be, on average over all and their time."""
    return limits.num_at_once * limits.most_conversation // BLOCK_SIZE // 3
