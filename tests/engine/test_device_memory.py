"""A step that the device's memory does not hold costs the largest request of it; the others go on with their own texts."""

from __future__ import annotations

import pytest

from forerun import SamplingParams
from forerun.errors import DeviceLostError, ErrorKind, StepError
from tests.executor.simulations import assert_nothing_is_held, drain, run, simulated_engine

PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [[1] * 30, [2] * 5, [3] * 9, [4] * 20]


def refuse():
    """A step for which there is no memory when it begins."""
    raise StepError("device memory: a step did not fit")


class Late:
    """The result of a step of which nobody knows until it is read that there was no memory for it."""

    def result(self):
        refuse()


def limited(engine, most_rows, answer=refuse):
    """Let an engine's executor answer steps of more rows with `answer`; a list that gets the rows of those steps."""
    refused, execute = [], engine.parts.executor.execute

    def executing(plan):
        num_rows = len(plan.rows.token_ids)
        if num_rows > most_rows:
            refused.append(num_rows)
            return answer()
        return execute(plan)

    engine.parts.executor.execute = executing
    return refused


def texts(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def test_a_step_whose_requests_were_aborted_ends_nobody_when_it_is_found_not_to_fit():
    engine = simulated_engine(delay=1)
    refused = limited(engine, most_rows=20, answer=Late)
    engine.add_request("long", PROMPTS[0], PARAMS)
    engine.step()
    assert refused == [30]
    engine.abort("long")
    engine.step()
    (output,) = run(engine, PROMPTS[1:2], PARAMS)
    assert output.error is None
    assert_nothing_is_held(engine)


@pytest.mark.parametrize(("delay", "answer"), [(0, refuse), (1, refuse), (0, Late)])
@pytest.mark.parametrize("rates", [None, (0.9, 0.8)])
def test_the_largest_requests_end_one_by_one_until_the_step_fits(delay, answer, rates):
    """Also where that is found when the result is read."""
    expected = texts(run(simulated_engine(rates=rates, delay=delay), PROMPTS, PARAMS))
    engine = simulated_engine(rates=rates, delay=delay)
    refused = limited(engine, most_rows=20, answer=answer)
    outputs = run(engine, PROMPTS, PARAMS)
    assert refused == [64, 34]
    assert [output.error is not None for output in outputs] == [True, False, False, True]
    assert texts(outputs)[1:3] == expected[1:3]
    assert_nothing_is_held(engine)


def test_a_request_that_ends_so_says_why_and_that_it_is_not_its_clients_mistake():
    engine = simulated_engine()
    limited(engine, most_rows=4)
    (output,) = run(engine, [[1] * 5], PARAMS)
    assert output.error == "device memory: a step did not fit"
    assert output.error_kind is ErrorKind.SERVER
    assert output.outputs[0].finish_reason == "error"
    assert_nothing_is_held(engine)


def test_all_completions_of_a_request_end_with_one_of_them():
    engine = simulated_engine()
    limited(engine, most_rows=4)
    (output,) = run(engine, [[1] * 5], SamplingParams(n=3, max_tokens=4))
    assert [one.finish_reason for one in output.outputs] == ["error"] * 3
    assert_nothing_is_held(engine)


@pytest.mark.parametrize("delay", [0, 1])
def test_memory_that_is_short_for_a_while_ends_no_request_that_comes_later(delay):
    engine = simulated_engine(delay=delay)
    execute, calls = engine.parts.executor.execute, []

    def failing_once(plan):
        calls.append(plan)
        if len(calls) == 4:
            raise StepError("device memory: a step did not fit")
        return execute(plan)

    engine.parts.executor.execute = failing_once
    expected = texts(run(simulated_engine(), PROMPTS[:2], PARAMS))
    first, second = run(engine, PROMPTS[:2], PARAMS)
    assert first.error is not None
    assert texts([second]) == expected[1:]
    assert first.outputs[0].token_ids == expected[0][: len(first.outputs[0].token_ids)]
    (later,) = run(engine, PROMPTS[:1], PARAMS)
    assert later.outputs[0].finish_reason == "length"
    assert_nothing_is_held(engine)


def test_a_lost_device_is_the_callers_to_know():
    engine = simulated_engine()

    def lose(_plan):
        raise DeviceLostError("device: it computes no more")

    engine.parts.executor.execute = lose
    engine.add_request("0", [1, 2, 3], PARAMS)
    with pytest.raises(DeviceLostError):
        drain(engine)
