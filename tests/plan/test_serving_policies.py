"""How many sequences of a load fit into an engine's KV memory, and what all prompts share of it."""

from __future__ import annotations

from dataclasses import replace
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.engine.simulation import SimulationSettings, linear_decode_seconds
from forerun.engine.speculation import FixedLength
from forerun.errors import ConfigError
from forerun.executor.simulated_text import ConditionalAcceptance
from forerun.plan.load import Load
from forerun.plan.serving_policies import KV_CONFIDENCE, serving_policies
from forerun.plan.simulation.requests import synthetic_requests
from forerun.plan.simulation.result import SimulationResult
from forerun.plan.simulation.simulate import simulate
from tests.plan.worlds import engine_model, speculation

ENGINE = engine_model(num_blocks=240, max_model_len=1024)
LOAD = Load(rate=200, isl=320, osl=64, prefix_hit_rate=0.8)


def simulated(load: Load, *, max_num_seqs: int) -> SimulationResult:
    """An engine in overload, with as many sequences at once as it may have."""
    settings = SimulationSettings(
        num_blocks=ENGINE.num_blocks,
        block_size=ENGINE.block_size,
        max_model_len=ENGINE.max_model_len,
        max_num_batched_tokens=ENGINE.max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        decode_seconds=linear_decode_seconds,
    )
    return simulate(settings, synthetic_requests(load, 300, seed=1))


def test_what_all_prompts_share_is_held_once() -> None:
    assert ENGINE.shared_blocks(LOAD) == 16
    # 256 tokens of each prompt are shared: as if the engine had 16 blocks less, for prompts of 64 tokens
    own = replace(LOAD, isl=64, prefix_hit_rate=0.0)
    assert ENGINE.num_places(LOAD, 2) == replace(ENGINE, num_blocks=224).num_places(own, 2)


def test_the_simulator_runs_as_many_sequences_as_the_formula_says() -> None:
    places = ENGINE.num_places(LOAD, 0)
    fits = simulated(LOAD, max_num_seqs=places)
    (replica,) = fits.replicas
    assert replica.num_running > 0.9 * places
    assert replica.num_preemptions <= 3  # of 300 requests
    assert fits.to_json()["prefix_cache_hit_rate"] == pytest.approx(0.8, abs=0.01)
    assert simulated(LOAD, max_num_seqs=places + places // 2).num_preemptions > 30


def test_without_a_shared_beginning_as_many_do_not_fit() -> None:
    places = ENGINE.num_places(LOAD, 0)
    alone = replace(LOAD, prefix_hit_rate=0.0)
    assert places > 2 * ENGINE.num_places(alone, 0)
    assert simulated(alone, max_num_seqs=places).replicas[0].num_running < places / 2


@given(st.floats(0.0, 0.99), st.floats(0.0, 0.99), st.integers(0, 8), st.floats(0.0, 1.0))
def test_more_that_is_shared_never_leaves_fewer_places(one: float, other: float, num_drafted: int, cv: float) -> None:
    less, more = sorted((one, other))
    found = [
        ENGINE.num_places(replace(LOAD, prefix_hit_rate=rate, osl_cv=cv), num_drafted) for rate in (0.0, less, more)
    ]
    assert found == sorted(found)


@pytest.mark.parametrize("cv", [0.5, 1.0, 2.0])
def test_places_are_those_of_answers_that_are_gamma_distributed(cv: float) -> None:
    """A moment falls into a long answer the likelier, and anywhere within it."""
    source = np.random.default_rng(0)
    load = Load(rate=1, isl=100, osl=200, osl_cv=cv)
    longer = 1.0 / cv**2 + 1.0  # the shape of a gamma distribution whose chances are weighed with its values
    written = source.gamma(longer, load.osl * cv**2, 2_000_000) * source.random(2_000_000)
    engine = engine_model(num_blocks=20_000, max_model_len=1024)
    blocks = (load.isl + written.mean() + 1) / engine.block_size + 1.5
    deviation = written.std() / engine.block_size * NormalDist().inv_cdf(KV_CONFIDENCE)
    places = engine.num_places(load, 0)
    needed = [count * blocks + deviation * count**0.5 for count in (0.995 * places, 1.005 * places + 1)]
    assert needed[0] < engine.num_blocks < needed[1]


def test_beside_a_drafter_an_engine_has_its_blocks_and_no_longer_sequences() -> None:
    head = replace(speculation(0.8, 0.6), num_blocks=60)
    beside = ENGINE.beside(head)
    assert (beside.num_blocks, beside.max_model_len) == (60, 960)
    assert ENGINE.beside(None) is ENGINE.beside(speculation(0.8)) is ENGINE
    load = replace(LOAD, prefix_hit_rate=0.0)
    plain, drafting = (max(one.max_num_seqs for one in serving_policies(ENGINE, [kind], load)) for kind in (None, head))
    assert drafting == replace(ENGINE, num_blocks=60).num_places(load, 2) < plain
    roomy = next(one for one in serving_policies(ENGINE, [replace(head, num_blocks=None)], load) if one.has_all_places)
    assert replace(roomy, speculation=head).for_load(ENGINE, load).max_num_seqs == drafting < roomy.max_num_seqs
    with pytest.raises(
        ConfigError, match=r"60 blocks of 16 tokens that are left beside the drafter of draft; .*--method"
    ):
        serving_policies(ENGINE, [None, head], replace(load, isl=980, osl=20))


def test_a_beginning_that_fills_the_memory_leaves_no_place() -> None:
    long = replace(LOAD, isl=900, prefix_hit_rate=0.99)
    small = replace(ENGINE, num_blocks=50)
    assert small.num_places(long, 0) == 0
    with pytest.raises(ConfigError, match="more KV memory"):
        serving_policies(small, [None], long)


def test_one_that_fills_the_memory_fits_however_long_its_drafts_may_be() -> None:
    small, load = replace(ENGINE, num_blocks=8), Load(rate=1, isl=64, osl=64)
    (policy, *_) = serving_policies(small, [speculation(0.8, 0.6, 0.5)], load)
    assert policy.max_num_seqs == small.num_places(load, 3) == 1
    settings = SimulationSettings(num_blocks=8, max_model_len=128, drafting=ConditionalAcceptance((0.8, 0.6, 0.5)))
    result = simulate(settings, synthetic_requests(load, 3), make_control=lambda: FixedLength(num_speculative_tokens=3))
    assert result.num_preemptions == 0
    assert result.num_output_tokens == 3 * 64
