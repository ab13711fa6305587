"""OpenVINO GenAI on an f16 GGUF; speculation by its prompt lookup."""

from __future__ import annotations

from importlib.metadata import version

import numpy as np
import openvino
import openvino_genai

from benchmarks.peers.workers.protocol import Load, Prompts, Worker, Written, serve


class OpenVino:
    """`LLMPipeline.generate` with OpenVINO's own choice of arithmetic, without prefix cache."""

    def __init__(self, load: Load) -> None:
        self._speculation = load.speculation or {}
        lookup = {"prompt_lookup": True} if self._speculation else {}
        scheduling = openvino_genai.SchedulerConfig()
        scheduling.enable_prefix_caching = False
        self._pipeline = openvino_genai.LLMPipeline(
            load.model, "CPU", scheduler_config=scheduling, INFERENCE_NUM_THREADS=load.num_threads, **lookup
        )

    def generate(self, prompts: Prompts, max_tokens: int) -> Written:
        token_ids = np.array(prompts, dtype=np.int64)
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(token_ids), openvino.Tensor(np.ones_like(token_ids)))
        config = openvino_genai.GenerationConfig(
            max_new_tokens=max_tokens, ignore_eos=True, do_sample=False, **self._speculation
        )
        results = self._pipeline.generate(inputs, config)
        passes = len(results.perf_metrics.raw_metrics.m_batch_sizes)
        accepted = max_tokens - passes if self._speculation else None
        return Written([list(tokens) for tokens in results.tokens], accepted=accepted)


def start(load: Load) -> Worker:
    return Worker(version=f"openvino-genai {version('openvino-genai')}", generate=OpenVino(load).generate)


if __name__ == "__main__":
    serve(start)
