"""forerun, through its public API."""

from __future__ import annotations

from importlib.metadata import version
from itertools import count

from benchmarks.peers.workers.protocol import Load, Prompts, Worker, Written, serve
from forerun import LLM, SamplingParams
from forerun.bench.curve import measure_curve
from forerun.bench.instruments import BandwidthProbe, Stopwatch, read_by_torch
from forerun.bench.machine import describe_kernels


class Forerun:
    """`LLM.generate` without prefix cache, so that each repeat computes its prompt.

    And every text has a salt of its own, so that no drafter knows it from an earlier round.
    """

    def __init__(self, load: Load) -> None:
        self._llm = LLM(
            load.model,
            dtype="bfloat16",
            max_model_len=load.max_model_len,
            max_num_seqs=8,
            enable_prefix_caching=False,
            speculative_config=load.speculation,
            **load.settings,
        )
        self._salts = map(str, count())
        self.kernels = describe_kernels(self._llm)

    def generate(self, prompts: Prompts, max_tokens: int) -> Written:
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        salted = [
            {"prompt_token_ids": prompt, "cache_salt": salt} for prompt, salt in zip(prompts, self._salts, strict=False)
        ]
        outputs = self._llm.generate(salted, sampling, use_tqdm=False)
        token_ids = [output.outputs[0].token_ids for output in outputs]
        if not self._llm.settings.speculative_config:
            return Written(token_ids)
        return Written(
            token_ids,
            drafted=sum(output.speculation.num_draft_tokens for output in outputs),
            accepted=sum(output.speculation.num_accepted_tokens for output in outputs),
        )

    def curve(self, rows: list[int], context: int, repeats: int) -> dict[int, list[float]]:
        curve = measure_curve(self._llm, rows=rows, contexts=[context], sequences=[], repeats=repeats)
        return {point.rows: [milliseconds / 1e3 for milliseconds in point.all_milliseconds] for point in curve.points}

    def bandwidth(self) -> float:
        read = self._llm.kernels.read if self._llm.kernels else read_by_torch
        return BandwidthProbe(Stopwatch(self._llm.device), read=read).measure()


def start(load: Load) -> Worker:
    llm = Forerun(load)
    versions = f"forerun {version('forerun')}, torch {version('torch')}, kernels: {llm.kernels}"
    return Worker(version=versions, generate=llm.generate, curve=llm.curve, bandwidth=llm.bandwidth)


if __name__ == "__main__":
    serve(start)
