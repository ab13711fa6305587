"""What an engine verified at each step, to hold a walk over the same texts to."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from forerun import SamplingParams
from forerun.bench.draft_walk import DraftWalk
from forerun.bench.replay import standing_nodes
from forerun.core.draft import NO_DRAFT
from forerun.core.step import ReadyResult
from forerun.engine.engine import Engine
from forerun.engine.speculation import FixedLength


@dataclass
class VerifiedDrafts:
    """An executor that keeps what each step verified, and what stood: by prompt, a list of (place, draft, accepted)."""

    executor: object
    steps: dict = field(default_factory=dict)
    specs: dict = field(default_factory=dict)  # by seq_id, as the following
    drafts: dict = field(default_factory=dict)  # of the step before
    places: dict = field(default_factory=dict)  # tokens of the answer

    def prepare(self, spec):
        self.executor.prepare(spec)

    def release(self, ended):
        self.executor.release(ended)

    def execute(self, plan):
        self.specs.update((spec.seq_id, spec) for spec in plan.new)
        result = self.executor.execute(plan).result()
        for planned, found in zip(plan.sequences, result.sequences, strict=True):
            if not found.is_decided:
                continue
            key = tuple(self.specs[planned.seq_id].prompt_ids)
            place = self.places.get(planned.seq_id, 0)
            draft = self.drafts.get(planned.seq_id, NO_DRAFT).first(planned.num_draft)
            self.steps.setdefault(key, []).append((place, draft, found.accepted))
            self.drafts[planned.seq_id] = found.draft
            self.places[planned.seq_id] = place + len(found.token_ids)
        return ReadyResult(result)


def verified(llm, recording, *, batch_size):
    """What an engine verifies at each step that writes the recorded answers, with drafts of the full length."""
    observed = VerifiedDrafts(llm.engine.parts.executor)
    control = FixedLength(num_speculative_tokens=llm.speculative.num_speculative_tokens)
    engine = Engine(replace(llm.engine.parts, executor=observed, control=control))
    texts = pairs(recording)
    for start in range(0, len(texts), batch_size):
        for number, (text, seed) in enumerate(texts[start : start + batch_size], start):
            sampling = SamplingParams(
                temperature=text.temperature,
                max_tokens=len(text.answer_ids),
                seed=seed,
                ignore_eos=True,
                detokenize=False,
            )
            engine.add_request(str(number), text.prompt_ids, sampling)
        while engine.has_work:
            engine.step()
    return observed.steps


def pairs(recording):
    """Each text with its seed, as a walk takes them."""
    return list(zip(recording.texts, recording.seeds, strict=True))


def same(draft, other):
    return (draft.token_ids, draft.depths(), [draft.parent(node) for node in range(len(draft))], draft.source) == (
        other.token_ids,
        other.depths(),
        [other.parent(node) for node in range(len(other))],
        other.source,
    )


def assert_same_drafts(walked, engine, recording, *, batch_size):
    """Hold a walk with one LLM to a run of another one of the same configuration; return how many draft tokens stood."""
    drafts = list(DraftWalk(llm=walked).drafts(pairs(recording)))
    steps = verified(engine, recording, batch_size=batch_size)
    num_drafted = num_stood = 0
    for text, found in zip(recording.texts, drafts, strict=True):
        done = 0
        for place, draft, accepted in steps[tuple(text.prompt_ids)]:
            assert place == done, "the engine writes the recorded text"
            assert same(found[place], draft), (text.prompt_ids, place, found[place], draft)
            assert standing_nodes(found[place], text.answer_ids, place) == accepted
            done += len(accepted) + 1
            num_drafted, num_stood = num_drafted + len(draft), num_stood + len(accepted)
        assert done == len(found) == len(text.answer_ids)
    assert num_drafted > 0
    assert walked.executor.drafting.num_failures == 0
    return num_stood
