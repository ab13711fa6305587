"""The deployment plan of a tuning: one engine with the configuration that was found, for `forerun emit`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from forerun.plan.deployment_plan import DeploymentPlan, Layout, PlannedEngine
from forerun.plan.load import Load
from forerun.plan.sla import DEFAULT_ATTAINMENT, LATENCIES, Sla
from forerun.plan.tuning.offered_load import OfferedLoad
from forerun.plan.tuning.run_figures import RunFigures
from forerun.plan.tuning.tuning_report import TuningReport

MS = 1e3


def tuned_plan(
    report: TuningReport, *, offered: OfferedLoad, prompt_lengths: Sequence[int], engine: PlannedEngine
) -> DeploymentPlan:
    """The plan: what was run is what is predicted.

    Where no goals were given the SLA is what the runs kept: their 95th percentiles.

    Args:
        report: of the tuning.
        offered: how its requests came; clients are written as the rate of requests that they had answered.
        prompt_lengths: tokens of its prompts.
        engine: settings of the engine that ran the chosen configuration.
    """
    run = report.medians[report.best.name]
    sla = report.sla or _kept_limits(run)
    feasible = report.sla is None or (run.attainment or 0.0) >= sla.attainment
    figures = _figures(run)
    warnings = ["measured on one engine: forerun plan says how many another load needs"]
    if report.sla is None:
        warnings.append(
            "no goals were given: the SLA is the 95th percentile of each latency while tuning; fewer requests keep all of them"
        )
    if offered.rate is None:
        warnings.append(f"the rate is that of {report.load}, which wait for their answers")
    return DeploymentPlan(
        model=report.model,
        profile={"model": report.model, "machine": report.machine.partition("; ")[0]},
        load=_load(offered, prompt_lengths, run),
        sla=sla,
        feasible=feasible,
        best_achievable=None if feasible else figures,
        layout=Layout.AGGREGATED,
        replicas=1,
        prefill_replicas=0,
        decode_replicas=0,
        engine=engine,
        speculative_config=None if report.best.speculative_config is None else dict(report.best.speculative_config),
        predicted=figures,
        warnings=tuple(warnings),
    )


def _load(offered: OfferedLoad, prompt_lengths: Sequence[int], run: RunFigures) -> Load:
    lengths = np.array(prompt_lengths, dtype=np.float64)
    return Load(
        rate=run.num_requests / run.seconds if offered.rate is None else offered.rate,
        isl=float(lengths.mean()),
        osl=run.num_output_tokens / run.num_requests,
        cv=offered.burstiness**-0.5,
        isl_cv=float(lengths.std() / lengths.mean()),
    )


def _kept_limits(run: RunFigures) -> Sla:
    """Limits that the run kept; answers of one token have no time per token."""
    return Sla(ttft=run.ttft.p95 or None, tpot=run.tpot.p95 or None, e2el=run.e2el.p95, attainment=DEFAULT_ATTAINMENT)


def _figures(run: RunFigures) -> dict[str, Any]:
    """The run in the keys of a plan's predictions."""
    found: dict[str, Any] = {"attainment": run.attainment}
    for name in LATENCIES:
        spread = getattr(run, name)
        found |= {f"{name}_{what}_ms": MS * getattr(spread, what) for what in ("mean", "p50", "p95", "p99")}
    return found | {
        "goodput_requests_per_second": run.goodput,
        "output_tokens_per_second": run.tokens_per_second,
        "acceptance_length": run.acceptance_length,
        "joules_per_output_token": run.joules_per_token,
    }
