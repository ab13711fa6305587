"""Sequences and requests for the drafters' tests, and the contract that every draft keeps."""

from __future__ import annotations

from forerun.core.draft import Draft
from forerun.core.sampling_params import SamplingParams
from forerun.core.sequence import Sequence
from forerun.drafters.base import DraftContext, Drafter, DraftRequest, TargetInfo

VOCAB_SIZE = 50
TARGET = TargetInfo(vocab_size=VOCAB_SIZE, max_model_len=4096, num_speculative_tokens=64)


def sequence(
    prompt: list[int], output: list[int] | None = None, *, seq_id: int = 1, salt: str | None = None
) -> Sequence:
    return Sequence(
        seq_id=seq_id,
        prompt_ids=list(prompt),
        output_ids=list(output or []),
        sampling=SamplingParams(),
        seed=0,
        cache_salt=salt,
    )


def propose(drafter: Drafter, of: Sequence, *, max_tokens: int = 64, max_depth: int = 64) -> Draft:
    """The draft for one sequence that was started before."""
    (draft,) = drafter.propose(DraftContext(requests=[DraftRequest(of, max_tokens, max_depth)]))
    return draft


def start_and_propose(drafter: Drafter, prompt: list[int], *, max_tokens: int = 64, max_depth: int = 64) -> Draft:
    started = sequence(prompt)
    drafter.start(started)
    return propose(drafter, started, max_tokens=max_tokens, max_depth=max_depth)


def assert_valid(draft: Draft, *, max_tokens: int, max_depth: int) -> None:
    assert len(draft) <= max_tokens
    assert max(draft.depths(), default=0) <= max_depth
    assert all(0 <= token_id < VOCAB_SIZE for token_id in draft.token_ids)
    assert draft.parents is None or len(draft.parents) == len(draft)
    assert all(-1 <= draft.parent(node) < node for node in range(len(draft)))
    siblings = [(draft.parent(node), draft.token_ids[node]) for node in range(len(draft))]
    assert len(set(siblings)) == len(siblings), "two siblings have the same token"
