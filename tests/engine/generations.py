"""Generations made in one line, and the part of a step that stands between scheduler and commit."""

from __future__ import annotations

import itertools

from forerun.core.draft import NO_DRAFT
from forerun.core.sampling_params import SamplingParams
from forerun.core.sequence import Sequence
from forerun.engine.generation import Generation
from forerun.kv.block_table import BlockTable
from forerun.ops.sampling import SamplingRules

BLOCK = 4
VOCAB_SIZE = 100
seq_ids = itertools.count()


def generation_of(pool, prompt_ids, *, output_ids=(), draft=NO_DRAFT, index=0, stop_tokens=None, text=None, **params):
    """A generation that has computed nothing; `params` are its sampling settings."""
    sampling = SamplingParams(**params)
    sequence = Sequence(
        seq_id=next(seq_ids), prompt_ids=list(prompt_ids), output_ids=list(output_ids), sampling=sampling, seed=0
    )
    return Generation(
        sequence=sequence,
        request_id=str(sequence.seq_id),
        index=index,
        slot=BlockTable(pool, block_size=BLOCK),
        rules=SamplingRules(sampling, prompt_ids=sequence.prompt_ids, vocab_size=VOCAB_SIZE),
        stop_tokens=stop_tokens or {},
        max_length=len(prompt_ids) + sampling.max_tokens,
        text=text,
        draft=draft,
    )


def finish_step(works, *, token_id=1):
    """Commit the rows of a step; what reached its end gets `token_id` and loses its draft."""
    for work in works:
        sequence = work.generation.sequence
        work.generation.slot.commit(sequence.tokens_between(work.start, work.start + work.num_tail))
        if work.reaches_end:
            sequence.output_ids.append(token_id)
            work.generation.draft = NO_DRAFT
        work.generation.slot.release_surplus()
