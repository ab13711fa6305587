"""A simulated run does what a real one does: the same steps, the same drafts, the same acceptance."""

from __future__ import annotations

import time

import pytest

from forerun.bench.energy import EnergyMeter
from forerun.bench.profiling.traces import trace_drafts
from forerun.bench.tuning.real_runs import Probe, RealRuns
from forerun.bench.tuning.simulated_runs import SimulatedRuns
from forerun.bench.tuning.target_rows import TargetRows
from forerun.core.draft import Draft
from forerun.errors import ForerunError
from forerun.plan.tuning.offered_load import OfferedLoad
from tests.bench.profiling.tiny import draft_model
from tests.bench.tuning.workloads import NGRAM, SETTINGS, SUFFIX, candidate, recorded, workload
from tests.engines import tiny_target

STEP = 0.01
CONFIGS = {
    "plain": None,
    "ngram": NGRAM,
    "suffix": SUFFIX,
    "ngram-by-batch": {**NGRAM, "num_speculative_tokens_per_batch_size": [[1, 1, 3], [2, 4, 1]]},
}
HYBRID = {
    "method": "hybrid",
    "num_speculative_tokens": 6,
    "drafters": [{"method": "suffix"}, {"method": "recycle", "num_speculative_tokens": 3}],
}


def no_probe(_):
    raise AssertionError("drafts that go by the text are replayed, not probed")


def no_trace(_):
    return None


def half_right(_):
    return Probe(conditional_acceptance=(0.5,), seconds_per_draft=0.0)


def both(of, *, trace=no_trace, probe=no_probe):
    """Real and simulated runs of one workload over the same recorded answers; `trace` may be None for a real one."""
    target = tiny_target()
    recording = recorded(target, of)
    texts = recording.texts
    real = RealRuns(target=target, settings=SETTINGS, workload=of, texts=texts, meter=EnergyMeter([]))
    simulated = SimulatedRuns(
        target=target,
        settings=SETTINGS,
        workload=of,
        texts=texts,
        rows=TargetRows(),
        step_seconds=lambda _: STEP,
        trace=trace or (lambda one: trace_drafts(one.name, one.speculative_config, recording, target, SETTINGS)),
        probe=probe,
    )
    return real, simulated


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(("clients", "temperature"), [(1, 0.0), (3, 1.0)])
def test_a_simulated_run_accepts_exactly_what_a_real_one_does(name, clients, temperature):
    real, simulated = both(workload(load=OfferedLoad(concurrency=clients), temperature=temperature))
    one = candidate(CONFIGS[name])
    ran, predicted = real.run(one, 0), simulated.simulate(one)
    assert predicted.num_output_tokens == ran.num_output_tokens
    assert predicted.acceptance_length == ran.acceptance_length
    assert ran.num_differing == 0


@pytest.mark.parametrize(
    ("changes", "clients", "temperature"),
    [
        ({}, 1, 0.0),
        ({"draft_sample_method": "coupled"}, 3, 0.6),
        ({"draft_tree": [2, 1], "num_speculative_tokens": 4}, 3, 0.0),
    ],
    ids=["chain", "coupled", "tree"],
)
def test_a_drafter_with_a_model_accepts_in_a_simulated_run_what_it_does_in_a_real_one(changes, clients, temperature):
    of = workload(load=OfferedLoad(concurrency=clients), temperature=temperature)
    real, simulated = both(of, trace=None, probe=half_right)
    one = candidate(draft_model(**changes))
    ran, predicted = real.run(one, 0), simulated.simulate(one)
    assert ran.num_differing == 0
    assert predicted.acceptance_length == ran.acceptance_length


def test_a_verifier_that_draws_anew_is_simulated_by_the_rates_of_a_real_run():
    of = workload(temperature=1.0)
    _, simulated = both(of, trace=None, probe=lambda _: Probe(conditional_acceptance=(1.0, 0.0), seconds_per_draft=0))
    config = draft_model(draft_sample_method="probabilistic", rejection_sample_method="standard")
    assert simulated.simulate(candidate(config)).acceptance_length == pytest.approx(2.0, rel=0.1)


@pytest.mark.parametrize("config", [{"method": "auto"}, HYBRID])
def test_look_ups_that_learn_from_the_target_are_replayed_too(config):
    real, simulated = both(workload(max_tokens=48))
    ran, predicted = real.run(candidate(config), 0), simulated.simulate(candidate(config))
    assert not simulated.probed
    assert predicted.acceptance_length == pytest.approx(ran.acceptance_length, rel=0.15)


@pytest.mark.parametrize("clients", [1, 3])
def test_a_drafter_that_goes_by_the_clock_sees_the_simulated_steps(clients):
    class Slow:
        needs = frozenset()
        num_asked = 0

        def __init__(self, target):
            pass

        def start(self, sequence):
            pass

        def propose(self, context):
            drafts = []
            for request in context.requests:
                Slow.num_asked += 1
                end = time.thread_time() + 0.0005  # little of a step, and nearly all the time where steps take none
                while time.thread_time() < end:
                    pass
                done = len(request.sequence.output_ids)
                drafts.append(Draft(tuple(answers[tuple(request.sequence.prompt_ids)][done : done + 1])))
            return drafts

        def stop(self, sequence):
            pass

    _, simulated = both(workload(load=OfferedLoad(concurrency=clients), max_tokens=48))
    answers = {tuple(text.prompt_ids): text.answer_ids for text in simulated.texts}
    config = {"method": "auto", "auto_memory": 0, "drafter": {"method": Slow}}
    simulated.simulate(candidate(config))
    assert Slow.num_asked > 100


def test_a_simulated_run_takes_as_long_as_its_steps():
    of = workload(prompts=[[1, 2, 3]])
    _, simulated = both(of)
    found = simulated.simulate(candidate(None))
    assert found.seconds == pytest.approx(found.num_output_tokens * STEP)


def test_what_was_drafted_is_known_by_name():
    _, simulated = both(workload())
    found = simulated.simulate(candidate(NGRAM, name="ngram"))
    simulated.simulate(candidate(None, name="plain"))
    (drafted,) = simulated.drafted.values()
    assert [*simulated.drafted] == ["ngram"]
    assert drafted.tokens_per_step == pytest.approx(found.acceptance_length)
    assert drafted.tokens_per_step - 1.0 <= drafted.draft_tokens_per_step <= 3.0
    assert drafted.drafting_seconds_per_step > 0.0


def test_requests_come_at_the_rate_that_was_asked_for():
    of = workload(load=OfferedLoad(rate=2.0))
    _, simulated = both(of)
    assert [one.arrival for one in of.requests()][-1] == pytest.approx(len(of.prompts) / 2.0)
    found = simulated.simulate(candidate(None))
    assert found.seconds == pytest.approx(3.0 + found.e2el.mean, abs=0.5)


def test_the_next_round_finds_nothing_of_the_last_one():
    real, _ = both(workload())
    one = candidate(SUFFIX)
    lengths = [real.run(one, number).acceptance_length for number in range(3)]
    assert lengths[0] == lengths[1] == lengths[2]


def test_a_drafter_with_a_model_is_probed_once_whatever_the_limits():
    asked = []

    def probe(one):
        asked.append(one.name)
        return Probe(conditional_acceptance=(1.0, 0.0), seconds_per_draft=0.0)

    _, simulated = both(workload(), probe=probe)
    config = draft_model(num_speculative_tokens=2)
    first = simulated.simulate(candidate(config, name="a"))
    simulated.simulate(candidate(config, name="b"))
    assert asked == ["a"]
    assert simulated.probed == {"a", "b"}
    assert first.acceptance_length == pytest.approx(2.0, rel=0.1)


def test_a_probe_says_how_a_drafter_with_a_model_does():
    real, _ = both(workload())
    config = draft_model(num_speculative_tokens=2)
    found = real.probe(candidate(config), 2)
    assert 0.0 < found.conditional_acceptance[0] <= 1.0
    assert found.seconds_per_draft > 0.0


def test_steps_in_which_nothing_was_drafted_count_against_a_probed_drafter():
    real, _ = both(workload())
    one = candidate({**NGRAM, "prompt_lookup_min": 2, "prompt_lookup_max": 2})
    found = real.probe(one, 4)
    counts = real.engine(one).stats.speculation
    assert 0 < counts.num_drafts < counts.num_steps
    assert found.conditional_acceptance[0] == counts.accepted_per_position[0] / counts.num_steps


def test_a_wrong_configuration_is_named():
    real, simulated = both(workload())
    for run in (simulated.simulate, lambda one: real.run(one, 0)):
        with pytest.raises(ForerunError, match=r"^mine: .*unknown method"):
            run(candidate({"method": "nothing"}, name="mine"))
