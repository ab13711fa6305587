"""Offline batches on a Ray of this machine: in order, resumable, and the engine's own texts.

python -m benchmarks.peers install ray
"""

from __future__ import annotations

import json
import subprocess

import pytest

from forerun import LLM, SamplingParams
from tests.slow.environments import interpreter_of
from tests.slow.ray_services import MODEL, environment, needs_two_cores

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SCRIPT = """
import json, sys
from forerun.deploy.ray.data import EnginePool, batch_generate
from forerun.errors import ForerunError

given = json.loads(sys.argv[1])
try:
    results = batch_generate(pool=EnginePool(num_engines=2), part_size=2, **given)
    print(json.dumps({"results": list(results)}))
except ForerunError as error:
    print(json.dumps({"error": str(error)}))
"""


def generate(prompts, folder, *, model=MODEL, **sampling):
    given = {"prompts": prompts, "folder": str(folder), "model": model, "sampling": sampling}
    words = [str(interpreter_of("ray")), "-c", SCRIPT, json.dumps(given)]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@needs_two_cores
def test_results_come_in_order_and_a_run_goes_on_where_it_was_broken_off(tmp_path):
    prompts = [f"Number {n} is" for n in range(6)] + [[504, 2816, 314]]
    sampling = {"max_tokens": 8, "temperature": 0.8, "seed": 3}
    found = generate(prompts, tmp_path / "out", **sampling)["results"]
    given = [{"prompt_token_ids": one} if isinstance(one, list) else one for one in prompts]
    alone = LLM(MODEL).generate(given, SamplingParams(**sampling))
    assert [one["outputs"][0]["text"] for one in found] == [one.outputs[0].text for one in alone]
    first, second, *_ = sorted((tmp_path / "out").glob("part-*"))
    kept = first.stat().st_mtime_ns
    second.unlink()
    assert generate(prompts, tmp_path / "out", **sampling)["results"] == found
    assert first.stat().st_mtime_ns == kept


def test_a_model_that_is_not_there_is_named(tmp_path):
    said = generate(["a"], tmp_path / "out", model="no/such-folder")["error"]
    assert "no/such-folder" in said
