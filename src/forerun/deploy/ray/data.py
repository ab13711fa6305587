"""Many prompts through engines on a Ray cluster, offline: results in the order of the prompts, and resumable.

Prompts are cut into parts. An actor of Ray Data's pool writes a part with its engine, and this process keeps the
results in a file for each part, so a run that was broken off goes on with the parts that are missing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import forerun
from forerun.deploy.ray.installation import check_ray, check_same_version
from forerun.deploy.ray.offline_run import DEFAULT_PART_SIZE, OfflineRun, Prompt, ResultFolder
from forerun.errors import ConfigError, ForerunError, ModelError


@dataclass(frozen=True, kw_only=True)
class EnginePool:
    """Engines on the cluster, each in an actor; one computes with as many threads as it takes processors.

    Raises:
        ConfigError: a number is out of range.
    """

    num_engines: int = 1
    cpus_per_engine: float = 1.0
    gpus_per_engine: float = 0.0

    def __post_init__(self) -> None:
        if self.num_engines < 1:
            raise ConfigError(f"num_engines: got {self.num_engines}; must be 1 or more")
        for name in ("cpus_per_engine", "gpus_per_engine"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name}: got {getattr(self, name)}; must be 0 or more")


ONE_ENGINE = EnginePool()


class EngineActor:
    """One engine in an actor of the pool.

    What it refuses it says in its answer: Ray would start an actor again and again that cannot load its model.
    """

    def __init__(self, model: str, engine: Mapping[str, Any], sampling: Mapping[str, Any], version: str) -> None:
        self._failure: str | None = None
        try:
            check_same_version(version)
            self._llm = forerun.LLM(model, **engine)
            self._sampling = forerun.SamplingParams(**sampling)
        except ForerunError as error:
            self._failure = str(error)
        except Exception as error:
            self._failure = f"the engine cannot be started: {error!r}"

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, list[Any]]:
        """Write the parts of a batch, whose columns are numbers and JSON: no column type changes what JSON says."""
        answers = [json.dumps(self._answer(json.loads(text))) for text in batch["prompts"]]
        return {"part": list(batch["part"]), "answer": answers}

    def _answer(self, given: Mapping[str, Any]) -> dict[str, Any]:
        if self._failure is not None:
            return {"error": self._failure}
        prompts = [one if isinstance(one, str) else {"prompt_token_ids": one} for one in given["prompts"]]
        sampling = [replace(self._sampling, seed=seed) for seed in given["seeds"]]
        try:
            outputs = self._llm.generate(prompts, sampling, use_tqdm=False)
        except ForerunError as error:
            return {"error": str(error)}
        return {"results": [_record(one) for one in outputs]}


def _record(output: forerun.RequestOutput) -> dict[str, Any]:
    return {
        "outputs": [
            {"text": one.text, "token_ids": list(one.token_ids), "finish_reason": one.finish_reason}
            for one in output.outputs
        ],
        "num_prompt_tokens": len(output.prompt_token_ids),
        "error": output.error,
    }


def batch_generate(
    prompts: Sequence[Prompt],
    folder: str | Path,
    *,
    model: str,
    sampling: Mapping[str, Any] | None = None,
    engine: Mapping[str, Any] | None = None,
    pool: EnginePool = ONE_ENGINE,
    part_size: int = DEFAULT_PART_SIZE,
    seed: int = 0,
) -> Iterator[dict[str, Any]]:
    """Complete each prompt on the engines of a pool, and return the results in the order of the prompts.

    A result has `outputs`, a list of completions with `text`, `token_ids` and `finish_reason`; `num_prompt_tokens`; and
    `error`, None but for a request that failed while it ran. Results are kept in the folder, part by part; parts that
    are there already are not written again. The Ray that this process is connected to is used, or the one that
    RAY_ADDRESS names, else one is started here, which ends with the run.

    Args:
        prompts: texts or token ids.
        folder: where results are kept; a new or empty one, or that of the same run, broken off.
        model: as `LLM` takes it, on every machine of the cluster.
        sampling: arguments of `SamplingParams`; without a seed each prompt has one of its own.
        engine: further arguments of `LLM`.
        pool: the engines.
        part_size: prompts of a part: what is lost at most, per engine, where a run is broken off.
        seed: draws the seeds of the prompts.

    Raises:
        ConfigError: Ray is absent, an argument is out of range, or the folder holds another run.
        RequestError: a sampling value is out of range, or a prompt is neither a text nor token ids.
        ModelError: an engine cannot be started, or refuses a prompt.
    """
    check_ray()
    forerun.SamplingParams(**(sampling or {}))  # refused here, before anything is started
    run = OfflineRun(
        prompts=prompts, model=model, sampling=sampling or {}, engine=engine or {}, part_size=part_size, seed=seed
    )
    results = ResultFolder(Path(folder), run)
    if missing := results.missing():
        _write_parts(run, results, missing, pool)
    return results.read()


def _write_parts(run: OfflineRun, results: ResultFolder, missing: Sequence[int], pool: EnginePool) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray
    from ray.data import ActorPoolStrategy

    is_own = not ray.is_initialized()
    if is_own and "RAY_ADDRESS" in os.environ:
        ray.init(address=os.environ["RAY_ADDRESS"])
    elif is_own:  # "local" starts one; without it Ray would join whatever cluster runs on this machine
        ray.init(address="local", include_dashboard=False)
    try:
        rows = [
            {"part": number, "prompts": json.dumps({"prompts": run.part(number), "seeds": run.seeds(number)})}
            for number in missing
        ]
        threads = str(max(1, int(pool.cpus_per_engine)))
        parts = ray.data.from_items(rows).map_batches(
            EngineActor,
            compute=ActorPoolStrategy(size=min(pool.num_engines, len(missing))),
            batch_size=1,
            fn_constructor_kwargs={
                "model": run.model,
                "engine": dict(run.engine),
                "sampling": dict(run.sampling),
                "version": forerun.__version__,
            },
            num_cpus=pool.cpus_per_engine,
            num_gpus=pool.gpus_per_engine,
            runtime_env={"env_vars": {"OMP_NUM_THREADS": threads}},
        )
        for row in parts.iter_rows():
            number, answer = int(row["part"]), json.loads(row["answer"])
            if "error" in answer:
                raise ModelError(f"part {number} of {run.num_parts}: {answer['error']}")
            results.write(number, answer["results"])
    finally:
        if is_own:
            ray.shutdown()
