"""The parts of an offline run, without Ray: order, seeds, resumption, and another run's folder."""

from __future__ import annotations

import json

import numpy as np
import pytest

from forerun.deploy.ray.offline_run import OfflineRun, ResultFolder
from forerun.errors import ConfigError, RequestError

PROMPTS = [f"prompt {n}" for n in range(7)]


def run(**changes):
    given = {"prompts": PROMPTS, "model": "m", "sampling": {"max_tokens": 4}, "engine": {}, "part_size": 3}
    return OfflineRun(**given | changes)


def fill(results, one, numbers):
    for number in numbers:
        results.write(number, [{"text": prompt} for prompt in one.part(number)])


def test_results_are_in_the_order_of_the_prompts_whatever_the_order_of_the_parts(tmp_path):
    results = ResultFolder(tmp_path, run())
    fill(results, run(), [2, 0, 1])
    assert [one["text"] for one in results.read()] == PROMPTS


def test_a_run_that_was_broken_off_goes_on_with_what_is_missing(tmp_path):
    fill(ResultFolder(tmp_path, run()), run(), [1])
    (tmp_path / "part-000002.1.part.jsonl").write_text("half")
    again = ResultFolder(tmp_path, run())
    assert again.missing() == [0, 2]
    with pytest.raises(ConfigError, match="2 of 3 parts are missing"):
        list(again.read())


def test_a_prompt_has_the_same_seed_in_parts_of_any_size_and_none_has_that_of_another():
    def seeds(**changes):
        one = run(**changes)
        return [seed for number in range(one.num_parts) for seed in one.seeds(number)]

    assert seeds(part_size=3) == seeds(part_size=2)
    assert len(set(seeds())) == len(PROMPTS)
    assert not set(seeds()) & set(seeds(seed=1))
    assert seeds(sampling={"seed": 5}) == [5] * len(PROMPTS)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"prompts": [*PROMPTS[:-1], "other"]}, "prompts_sha256"),
        ({"sampling": {"max_tokens": 5}}, "sampling"),
        ({"model": "n"}, "model"),
        ({"seed": 1}, "seed"),
    ],
)
def test_the_folder_of_another_run_is_refused(changes, names, tmp_path):
    ResultFolder(tmp_path, run())
    with pytest.raises(ConfigError, match=rf"another run \({names} differ\)"):
        ResultFolder(tmp_path, run(**changes))


def test_the_folder_of_another_version_is_refused(tmp_path, monkeypatch):
    ResultFolder(tmp_path, run())
    monkeypatch.setattr("forerun.__version__", "9.9")
    with pytest.raises(ConfigError, match="version"):
        ResultFolder(tmp_path, run())


def test_a_folder_of_other_things_is_refused(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match="not an empty folder"):
        ResultFolder(tmp_path, run())


def test_a_part_of_another_size_is_not_kept(tmp_path):
    results = ResultFolder(tmp_path, run())
    with pytest.raises(ValueError, match="2 results for 3 prompts"):
        results.write(0, [{}, {}])
    assert results.missing() == [0, 1, 2]


def test_token_ids_of_any_integer_type_and_texts_may_be_mixed(tmp_path):
    ResultFolder(tmp_path, run(prompts=["a", (1, 2)]))
    ResultFolder(tmp_path, run(prompts=["a", np.array([1, 2])]))
    assert json.dumps(run(prompts=[np.array([3])]).part(0)) == "[[3]]"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompts": []}, "at least one"),
        ({"prompts": "a text"}, "must be a list"),
        ({"part_size": 0}, "1 or more"),
        ({"engine": {"speculative_config": {"method": object}}}, "cannot be written as JSON"),
    ],
)
def test_bad_arguments_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        run(**changes)


@pytest.mark.parametrize("prompt", [None, [1.7], {"prompt": "text"}, b"text", [1, "two"]])
def test_a_prompt_that_is_neither_a_text_nor_token_ids_is_refused(prompt, tmp_path):
    with pytest.raises(RequestError, match=r"prompts: got .*; must be texts or lists of token ids"):
        ResultFolder(tmp_path, run(prompts=[*PROMPTS, prompt]))
