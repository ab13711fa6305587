"""The actor of an offline run, called as Ray Data calls it, and what is refused before Ray starts."""

from __future__ import annotations

import json

import pytest

import forerun
from forerun.core.outputs import CompletionOutput, RequestOutput
from forerun.deploy.ray import data
from forerun.deploy.ray.data import EngineActor, EnginePool, batch_generate
from forerun.errors import ConfigError, ModelError, RequestError


class FakeLLM:
    def __init__(self, model, **engine):
        if model == "absent":
            raise ModelError("absent: no such model")
        self.engine = engine

    def generate(self, prompts, sampling, *, use_tqdm):
        assert not use_tqdm
        if "too long" in prompts:
            raise RequestError("prompt: too long")
        return [
            RequestOutput(
                request_id=str(number),
                prompt=None,
                prompt_token_ids=[1, 2],
                outputs=[CompletionOutput(index=0, text=f"{prompt} {one.seed}", token_ids=[3], finish_reason="length")],
                finished=True,
            )
            for number, (prompt, one) in enumerate(zip(prompts, sampling, strict=True))
        ]


@pytest.fixture(autouse=True)
def _fake(monkeypatch):
    monkeypatch.setattr(forerun, "LLM", FakeLLM)


def ask(prompts, *, model="m", version=forerun.__version__, seeds=(5, 6)):
    actor = EngineActor(model, {}, {"max_tokens": 1}, version)
    text = json.dumps({"prompts": prompts, "seeds": list(seeds)})
    answer = actor({"part": [4], "prompts": [text]})
    assert answer["part"] == [4]
    return json.loads(answer["answer"][0])


def test_each_prompt_is_completed_with_its_own_seed():
    results = ask(["a", [7, 8]])["results"]
    assert [one["outputs"][0]["text"] for one in results] == ["a 5", "{'prompt_token_ids': [7, 8]} 6"]
    assert results[0]["num_prompt_tokens"] == 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": "absent"}, "no such model"),
        ({"version": "9.9"}, "what runs was started by 9.9"),
        ({"prompts": ["too long"]}, "prompt: too long"),
    ],
)
def test_what_an_actor_refuses_it_says_in_its_answer(given, message):
    assert message in ask(**{"prompts": ["a"], "seeds": [5]} | given)["error"]


def test_an_engine_that_finds_no_memory_says_so_and_is_not_started_again(monkeypatch):
    def no_memory(model, **engine):
        raise MemoryError

    monkeypatch.setattr(forerun, "LLM", no_memory)
    assert ask(["a"], seeds=[5]) == {"error": "the engine cannot be started: MemoryError()"}


def test_bad_sampling_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "check_ray", lambda: None)
    with pytest.raises(RequestError, match="temperature"):
        batch_generate(["a"], tmp_path / "out", model="m", sampling={"temperature": -1})
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("changes", [{"num_engines": 0}, {"cpus_per_engine": -1}])
def test_a_pool_without_engines_is_refused(changes):
    with pytest.raises(ConfigError, match=next(iter(changes))):
        EnginePool(**changes)
