"""Generations made in one line, and the part of a step that stands between plan and apply."""

from __future__ import annotations

import itertools

from forerun.core.draft import NO_DRAFT
from forerun.core.sampling_params import SamplingParams
from forerun.core.step import SequenceSpec
from forerun.engine.generation import Generation
from forerun.kv.block_table import BlockTable

BLOCK = 4
seq_ids = itertools.count()


def generation_of(
    pool, prompt_ids, *, output_ids=(), draft=NO_DRAFT, index=0, group=None, stop_tokens=None, text=None, **params
):
    """A generation that has computed nothing; `params` are its sampling settings."""
    sampling = SamplingParams(**params)
    seq_id = next(seq_ids)
    return Generation(
        spec=SequenceSpec(
            seq_id=seq_id,
            prompt_ids=list(prompt_ids),
            sampling=sampling,
            seed=0,
            max_length=len(prompt_ids) + sampling.max_tokens,
            stop_token_ids=frozenset(stop_tokens or ()),
        ),
        request_id=str(seq_id),
        index=index,
        group=group or str(seq_id),
        table=BlockTable(pool, block_size=BLOCK),
        stop_tokens=stop_tokens or {},
        text=text,
        output_ids=list(output_ids),
        draft=draft,
    )


def finish_step(chosen, *, token_id=1):
    """Apply the rows of a step; what reached its end gets `token_id` and loses its draft."""
    for generation, planned in chosen:
        generation.in_flight = None
        generation.table.commit(generation.tokens_between(planned.start, planned.start + planned.num_tail))
        if planned.reaches_end:
            generation.output_ids.append(token_id)
            generation.draft = NO_DRAFT
        generation.table.release_surplus()
