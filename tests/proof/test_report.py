"""What a report says of itself, and to machines."""

from __future__ import annotations

import json
import math

from forerun.proof.report import ProofReport, SampledFinding, Verdict


def test_a_report_of_an_impossible_outcome_is_json_that_anybody_reads():
    finding = SampledFinding(
        drafter="ngram",
        num_samples=9,
        num_draft_tokens=9,
        num_accepted_tokens=9,
        statistic=math.inf,
        degrees_of_freedom=5,
        threshold=30.0,
        verdict=Verdict.BUG,
    )
    report = ProofReport(
        model="m", configuration="c", dtype="float32", is_lossless_by_design=False, greedy=[], sampled=[finding]
    )
    (sampled,) = json.loads(json.dumps(report.as_json(), allow_nan=False))["sampled"]
    assert (sampled["statistic"], sampled["verdict"]) == ("inf", "bug")
