#!/bin/sh
# From a measurement of this machine to files that start servers, on the default model, in about three minutes:
# profile it, plan for a load and a latency target, let the simulator confirm, replay a day of traffic, write the files.
# SLA is the target; where no plan meets it on this machine the demo says so and ends with 1.
set -eu
folder=${1:-build/demo-plan}
sla=${SLA:-ttft=1s,itl=30ms}
mkdir -p "$folder"

about() { printf '\n%s\n' "$*"; }
say() { printf '\033[1m$ %s\033[0m\n' "$*"; "$@"; }

missed() {
    printf '\nNo plan meets %s on this machine; try another target: make demo-plan SLA=ttft=2s,itl=100ms\n' "$sla" >&2
    exit 1
}

about 'The model, unless it is here already.'
say "$BIN/forerun" models pull smollm2-135m
about 'What steps of this machine take, and what drafts of two methods yield: a minute, or nothing if it was measured before.'
[ -f "$folder/profile/profile.json" ] || say "$BIN/forerun" profile smollm2-135m --output-dir "$folder/profile" --budget 60s
about "How many engines 12 requests per second need so that 95 % of them have $sla, and what the simulator says of that."
say "$BIN/forerun" plan "$folder/profile" --sla "$sla" --load rate=12,isl=200,osl=100 \
    --method suffix --confirm --output "$folder/plan" || missed
"$BIN/python" - "$folder/day.jsonl" <<'PYTHON'
"""Writes the requests of two days, in mooncake's format: 2 to 16 per second, a burst in the second evening; twelve times as fast, so four hours."""

import json
import math
import random
import sys
from pathlib import Path

source, now, lines = random.Random(0), 0.0, []
while now < 14_400:
    rate = 9.0 - 7.0 * math.cos(2 * math.pi * now / 7_200) + (8.0 if 12_900 < now < 13_200 else 0.0)
    now += source.expovariate(rate)
    lines.append(json.dumps({"timestamp": round(1000 * now), "input_length": 200, "output_length": 100}))
Path(sys.argv[1]).write_text("\n".join(lines))
PYTHON
about 'Two days of traffic, each interval planned from those before it: what that costs, and who kept the target, beside a plan that
knew what comes (oracle) and fixed numbers of engines. Days of two hours rise steeply, so whoever predicts the last value is late.'
say "$BIN/forerun" plan "$folder/profile" --sla "$sla" --method suffix --replay "$folder/day.jsonl" \
    --interval 180 --period 7200 || missed
about 'Files that start the planned engines: with forerun here, on Kubernetes, and with vLLM.'
for system in forerun kubernetes; do
    say "$BIN/forerun" emit --plan "$folder/plan" --profile "$folder/profile" --to "$system" --output "$folder/$system"
done
say "$BIN/forerun" emit --plan "$folder/plan" --to vllm --model HuggingFaceTB/SmolLM2-135M-Instruct --output "$folder/vllm"
printf '\nIn %s:\n' "$folder"
ls "$folder" "$folder/forerun" "$folder/kubernetes" "$folder/vllm"
