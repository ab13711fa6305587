"""Asks Dynamo's planner what an engine can take; runs in Dynamo's environment, reads and writes JSON.

The first argument is the path of a file with "steps" (sequences, KV tokens, seconds of each), "itl_ms", "context", "osl",
"max_kv_tokens", "max_num_seqs" and "accept_length".
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from dynamo.common.forward_pass_metrics import ForwardPassMetrics, ScheduledRequestMetrics
from dynamo.planner.core.perf_model import DecodeRegressionModel

case = json.loads(Path(sys.argv[1]).read_text())
model = DecodeRegressionModel(max_num_fpm_samples=1000, min_observations=5, bucket_count=64)
for sequences, kv_tokens, seconds in case["steps"]:
    scheduled = ScheduledRequestMetrics(num_decode_requests=sequences, sum_decode_kv_tokens=kv_tokens)
    model.add_observation(ForwardPassMetrics(worker_id="w", dp_rank=0, wall_time=seconds, scheduled_requests=scheduled))
rate, itl_ms = model.find_best_engine_decode_rps(
    itl=case["itl_ms"],
    context_length=case["context"],
    osl=case["osl"],
    max_kv_tokens=case["max_kv_tokens"],
    max_num_seqs=case["max_num_seqs"],
    accept_length=case["accept_length"],
)
print(json.dumps({"rate": rate, "itl_ms": itl_ms}))
