"""Asks Dynamo's planner what an engine can take; runs in Dynamo's environment, reads and writes JSON.

The first argument is the path of a file with "ask", the question, "steps" (sequences, KV tokens, prompt tokens, seconds of
each), and the arguments of its formula under "with".
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from dynamo.common.forward_pass_metrics import ForwardPassMetrics, ScheduledRequestMetrics
from dynamo.planner.core.budget import proportional_clamp_pair
from dynamo.planner.core.perf_model import AggRegressionModel, DecodeRegressionModel, PrefillRegressionModel

MODELS = {
    "decode": (DecodeRegressionModel, "find_best_engine_decode_rps"),
    "prefill": (PrefillRegressionModel, "find_best_engine_prefill_rps"),
    "aggregated": (AggRegressionModel, "find_best_engine_agg_rps"),
}


def answer(case):
    """A list: requests per second and latencies in ms, or prefill and decode engines."""
    if case["ask"] == "split":
        return list(proportional_clamp_pair(**case["with"]))
    kind, formula = MODELS[case["ask"]]
    model = kind(max_num_fpm_samples=1000, min_observations=3, bucket_count=64)
    for sequences, kv_tokens, prompt_tokens, seconds in case["steps"]:
        scheduled = ScheduledRequestMetrics(
            num_decode_requests=sequences,
            sum_decode_kv_tokens=kv_tokens,
            num_prefill_requests=int(prompt_tokens > 0),
            sum_prefill_tokens=prompt_tokens,
        )
        fpm = ForwardPassMetrics(worker_id="w", dp_rank=0, wall_time=seconds, scheduled_requests=scheduled)
        model.add_observation(fpm)
    return list(getattr(model, formula)(**case["with"]))


if __name__ == "__main__":
    print(json.dumps(answer(json.loads(Path(sys.argv[1]).read_text()))))
