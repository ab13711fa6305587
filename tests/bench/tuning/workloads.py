"""Small workloads for tests, and the answers of a tiny target to them."""

from __future__ import annotations

from forerun.bench.recording import record
from forerun.bench.tuning.requests import KIND, TuningWorkload
from forerun.config.settings import EngineSettings
from forerun.config.speculative_config import resolve_speculative
from forerun.llm import LLM
from forerun.plan.sla import Sla
from forerun.plan.tuning.candidates import BatchLimits, Candidate
from forerun.plan.tuning.offered_load import OfferedLoad

SETTINGS = EngineSettings(model="tiny", block_size=4, max_num_seqs=4)
LIMITS = BatchLimits(max_num_seqs=4, max_num_batched_tokens=64)
PROMPTS = [[7, 8, 9] * 4, [11, 12] * 5, [20, 21, 22, 23], [1, 2, 3], [30, 31] * 3, [40, 41, 42] * 3]
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
SUFFIX = {"method": "suffix", "num_speculative_tokens": 6}


def workload(*, load=None, max_tokens=24, temperature=0.0, prompts=PROMPTS):
    return TuningWorkload(
        prompts=prompts,
        load=load or OfferedLoad(concurrency=1),
        max_tokens=max_tokens,
        temperature=temperature,
        sla=Sla(e2el=100.0),
    )


def candidate(config, *, name="x", limits=LIMITS):
    return Candidate(name=name, speculative_config=config, limits=limits)


def recorded(target, of):
    llm = LLM.from_target(target, SETTINGS, resolve_speculative(None))
    return record(llm, {KIND: of.prompts}, max_tokens=of.max_tokens, temperatures=(of.temperature,)).texts
