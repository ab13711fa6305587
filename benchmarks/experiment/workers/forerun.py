"""forerun, through its public API."""

from __future__ import annotations

from importlib.metadata import version

from benchmarks.experiment.workers.protocol import Answer, Load, Prompts, Worker, serve
from forerun import LLM, SamplingParams
from forerun.bench.machine import describe_kernels
from forerun.bench.offline import check_outputs
from forerun.core.outputs import RequestMetrics, RequestOutput


class Forerun:
    """`LLM.generate` without prefix cache, so that a prompt that comes again is computed again."""

    def __init__(self, load: Load) -> None:
        self._llm = LLM(load.model, enable_prefix_caching=False, speculative_config=load.speculation, **load.settings)
        self.kernels = describe_kernels(self._llm)

    def generate(self, prompts: Prompts, max_tokens: int) -> list[Answer]:
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, detokenize=False)
        outputs = self._llm.generate(prompts, sampling, use_tqdm=False)
        check_outputs(outputs)
        began = min(_metrics(output).arrival_time for output in outputs)
        return [_answer(output, began) for output in outputs]

    def num_failed_drafts(self) -> int:
        return self._llm.stats.num_failed_drafts


def _metrics(output: RequestOutput) -> RequestMetrics:
    assert output.metrics, "the engine times each request"
    return output.metrics


def _answer(output: RequestOutput, began: float) -> Answer:
    metrics = _metrics(output)
    assert metrics.first_token_time is not None, "an answer has at least one token"
    assert metrics.finished_time is not None, "it has ended"
    return Answer(
        output.outputs[0].token_ids,
        first_token_seconds=metrics.first_token_time - began,
        seconds=metrics.finished_time - began,
        drafted=output.speculation.num_draft_tokens,
        accepted=output.speculation.num_accepted_tokens,
    )


def start(load: Load) -> Worker:
    llm = Forerun(load)
    versions = f"forerun {version('forerun')}, torch {version('torch')}, kernels: {llm.kernels}"
    return Worker(version=versions, generate=llm.generate, num_failed_drafts=llm.num_failed_drafts)


if __name__ == "__main__":
    serve(start)
