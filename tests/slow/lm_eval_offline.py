"""lm-eval over an offline engine, in a process of its own: python -m tests.slow.lm_eval_offline SETTINGS.json

Runs in forerun's environment; lm-eval's own packages are found behind those, in the folder that the settings name.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

settings = json.loads(Path(sys.argv[1]).read_text())
sys.path.append(settings["lm_eval_packages"])

import lm_eval  # noqa: E402
from lm_eval.api.model import TemplateLM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from forerun import LLM, SamplingParams  # noqa: E402


class OfflineLM(TemplateLM):
    """What an evaluation asks of a model, by `LLM.generate`."""

    def __init__(self, llm):
        super().__init__()
        self._llm = llm

    @property
    def eot_token_id(self):
        return self._llm.get_tokenizer().eos_token_id

    def tok_encode(self, string, add_special_tokens=None, **_):
        return self._llm.get_tokenizer().encode(string, add_special_tokens=False)

    def _loglikelihood_tokens(self, requests, **_):
        prompts = [context + continuation for _, context, continuation in requests]
        sampling = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
        outputs = self._llm.generate(prompts, sampling, use_tqdm=False)
        return [self._judge(output, len(context)) for output, (_, context, _) in zip(outputs, requests, strict=True)]

    @staticmethod
    def _judge(output, num_context):
        """The continuation's log probability, and whether greedy decoding would write it."""
        token_ids, rows = output.prompt_token_ids[num_context:], output.prompt_logprobs[num_context:]
        scores = [row[token_id].logprob for row, token_id in zip(rows, token_ids, strict=True)]
        return sum(scores), all(row[t].rank == 1 for row, t in zip(rows, token_ids, strict=True))

    def generate_until(self, requests, disable_tqdm=False):
        prompts, wanted = zip(*(request.args for request in requests), strict=True)
        sampling = [
            SamplingParams(temperature=0, max_tokens=fields["max_gen_toks"], stop=fields["until"]) for fields in wanted
        ]
        outputs = self._llm.generate(list(prompts), sampling, use_tqdm=False)
        return [output.outputs[0].text for output in outputs]

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        raise NotImplementedError


found = lm_eval.simple_evaluate(
    model=OfflineLM(LLM(settings["model"], dtype="float32", max_model_len=1024)),
    tasks=settings["tasks"],
    task_manager=TaskManager(include_path=settings["include_path"]),
    bootstrap_iters=0,
)
report = {
    "results": found["results"],
    "samples": {task: [sample["resps"] for sample in samples] for task, samples in found["samples"].items()},
}
Path(settings["output"]).write_text(json.dumps(report))
