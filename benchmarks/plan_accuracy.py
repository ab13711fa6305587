"""The planner's formulas against the simulator, on a profile: latencies and attainment at several loads and fleets.

python -m benchmarks.plan_accuracy PROFILE [--output-json FILE]
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from forerun.plan.confirmation import simulated
from forerun.plan.deployment_planner import PlanningOptions, engine_model, plan_deployment
from forerun.plan.fleet_plan import FleetSearch
from forerun.plan.load import Load
from forerun.plan.profile import Profile
from forerun.plan.sla import Sla

SHAPES = ((100, 100), (300, 100), (200, 300))  # tokens of prompts and answers
COUNTS = (1, 4, 16)
SHARES = (0.3, 0.6, 0.85)  # of the most that the engines could take
NAMES = ("ttft", "tpot", "e2el")
SLA = Sla(ttft=2.0, tpot=0.05)


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One fleet under one load: milliseconds by the formulas and in the simulator."""

    isl: int
    osl: int
    engines: int
    share: float
    rate: float
    predicted_attainment: float
    simulated_attainment: float
    predicted: dict[str, float]
    simulated: dict[str, float]

    def error(self, name: str) -> float:
        """The formula's relative error."""
        return self.predicted[name] / self.simulated[name] - 1.0


def compare(profile: Profile, isl: int, osl: int, num_engines: int, share: float, seed: int) -> Compared:
    """Plan for a small load, then put a share of the most that its policy takes on so many engines."""
    options = PlanningOptions()
    small, answer = plan_deployment(profile, Load(rate=1.0, isl=isl, osl=osl), SLA, options)
    rate = share * num_engines * small.predicted["max_requests_per_second"] / small.replicas
    load = Load(rate=rate, isl=isl, osl=osl)
    engine = engine_model(profile)
    search = FleetSearch(engine, load, SLA, options.transfer, options.routing)
    plan = search.at(answer.plan.policy.for_load(engine, load), 0, num_engines)
    found = simulated(profile, plan, load, options, seed=seed)
    predicted: dict[str, float] = {}
    seen: dict[str, float] = {}
    for name in NAMES:
        latency, values = getattr(plan, name), found.latencies(name)
        predicted |= {
            f"{name}_mean": 1e3 * float(latency.mean[0]),
            f"{name}_p95": 1e3 * float(latency.quantile(0.95)[0]),
        }
        seen |= {f"{name}_mean": 1e3 * values.mean, f"{name}_p95": 1e3 * values.percentile(95)}
    return Compared(
        isl=isl,
        osl=osl,
        engines=num_engines,
        share=share,
        rate=rate,
        predicted_attainment=plan.attainment,
        simulated_attainment=found.attainment(SLA),
        predicted=predicted,
        simulated=seen,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("profile", type=Path)
    parser.add_argument("--output-json", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    profile = Profile.load(options.profile)
    rows = []
    print(
        " isl  osl engines share   rate |  TTFT mean, p95 |  TPOT mean, p95 |  E2EL mean, p95 | within SLA: formulas, simulator"
    )
    for isl, osl in SHAPES:
        for count in COUNTS:
            for share in SHARES:
                one = compare(profile, isl, osl, count, share, options.seed)
                rows.append(one)
                errors = " | ".join(
                    f"{one.error(f'{name}_mean'):+7.0%} {one.error(f'{name}_p95'):+7.0%}" for name in NAMES
                )
                print(
                    f"{isl:4} {osl:4} {count:7} {share:5.0%} {one.rate:6.1f} | {errors} | "
                    f"{one.predicted_attainment:.1%} {one.simulated_attainment:.1%}"
                )
    for key in [f"{name}_{what}" for name in NAMES for what in ("mean", "p95")]:
        errors_of = sorted(abs(one.error(key)) for one in rows)
        print(f"{key}: off by {errors_of[len(errors_of) // 2]:.0%} (median), {errors_of[-1]:.0%} (most)")
    if options.output_json is not None:
        document = {
            "machine": profile.machine,
            "model": profile.model,
            "seed": options.seed,
            "rows": list(map(asdict, rows)),
        }
        options.output_json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
