"""lm-eval's `local-completions` against a server that drafts: the numbers of an evaluation in process, to the bit.

Needs lm-eval in an environment of its own: python -m benchmarks.peers install lm_eval
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from benchmarks.serving import serving
from forerun.models.store import resolve_model
from tests.slow.environments import interpreter_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

MODEL = "smollm2-135m"
QUESTIONS = [
    ("What is the capital of France?", "Paris", "Berlin", "Madrid", "Rome"),
    ("What is the capital of Japan?", "Tokyo", "Beijing", "Seoul", "Bangkok"),
    ("How many legs does a spider have?", "eight", "six", "four", "two"),
    ("What colour is a ripe banana?", "yellow", "blue", "purple", "black"),
    ("Which planet do we live on?", "Earth", "Mars", "Venus", "Saturn"),
    ("What do bees make?", "honey", "milk", "bread", "paper"),
    ("What is frozen water called?", "ice", "steam", "sand", "oil"),
    ("Who wrote Romeo and Juliet?", "William Shakespeare", "Jane Austen", "Mark Twain", "Homer"),
    ("What is two plus three?", "five", "six", "nine", "one"),
    ("What is the opposite of hot?", "cold", "warm", "wet", "fast"),
    ("Which animal barks?", "a dog", "a cat", "a cow", "a fish"),
    ("In which season does snow fall?", "winter", "summer", "spring", "July"),
]
CHOICE = {
    "task": "choice",
    "output_type": "multiple_choice",
    "doc_to_text": "Question: {{question}}\nAnswer:",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{target}}",
    "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
}
WRITTEN = {
    "task": "written",
    "output_type": "generate_until",
    "doc_to_text": "Question: What is the capital of Italy?\nAnswer: Rome\nQuestion: {{question}}\nAnswer:",
    "doc_to_target": " {{choices[target]}}",
    # As many ends as code tasks have; a fifth would be refused by servers with OpenAI's limit.
    "generation_kwargs": {"until": ["\n", ".", ",", ";", "!", "?"], "max_gen_toks": 24, "do_sample": False},
    "metric_list": [{"metric": "exact_match", "ignore_case": True}],
}
TASKS = ["choice", "written"]


@pytest.fixture(scope="module")
def lm_eval():
    """The interpreter of lm-eval's environment."""
    return interpreter_of("lm_eval")


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """A folder with tasks on local data."""
    folder = tmp_path_factory.mktemp("tasks")
    documents = folder / "questions.jsonl"
    with documents.open("w") as lines:
        for number, (question, right, *wrong) in enumerate(QUESTIONS):
            target = number % (len(wrong) + 1)
            choices = [*wrong[:target], right, *wrong[target:]]
            lines.write(json.dumps({"question": question, "choices": choices, "target": target}) + "\n")
    for task in (CHOICE, WRITTEN):
        source = {
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(documents)}},
            "test_split": "test",
        }
        (folder / f"{task['task']}.yaml").write_text(yaml.safe_dump(task | source))
    return folder


@pytest.fixture(scope="module")
def offline(lm_eval, tasks, tmp_path_factory):
    """What lm-eval finds in process: {"results", "samples"}."""
    folder = tmp_path_factory.mktemp("offline")
    (packages,) = lm_eval.parents[1].glob("lib/python*/site-packages")
    settings = {
        "model": MODEL,
        "tasks": TASKS,
        "include_path": str(tasks),
        "lm_eval_packages": str(packages),
        "output": str(folder / "report.json"),
    }
    (folder / "settings.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "tests.slow.lm_eval_offline", str(folder / "settings.json")]
    subprocess.run(command, check=True, env=environment(folder), cwd=Path(__file__).parents[2])
    return json.loads((folder / "report.json").read_text())


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    options = ("--dtype=float32", "--max-model-len=2048", "--speculative-config.method=suffix")
    log = tmp_path_factory.mktemp("server") / "log"
    with serving(MODEL, *options, "--enable-tokenizer-info-endpoint", log=log) as server:
        yield server


def environment(folder):
    """Without a hub, and with lm-eval's caches where they do not stay."""
    return {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder)}


@pytest.mark.parametrize(
    "more",
    [
        {"tokenizer_backend": "remote"},
        {"tokenizer_backend": "remote", "num_concurrent": 4, "batch_size": 3},
        {"tokenizer_backend": "huggingface", "tokenizer": "FOLDER"},
        {"tokenizer_backend": "huggingface", "tokenizer": "FOLDER", "tokenized_requests": False},
    ],
)
def test_an_evaluation_over_http_gives_the_numbers_of_one_in_process(lm_eval, tasks, server, offline, more, tmp_path):
    more = {name: str(resolve_model(MODEL)) if value == "FOLDER" else value for name, value in more.items()}
    batch_size = more.pop("batch_size", 1)
    given = {"model": MODEL, "base_url": f"{server.url}/v1/completions", **more}
    command = [
        *(str(lm_eval), "-m", "lm_eval", "--model", "local-completions"),
        *("--model_args", ",".join(f"{name}={value}" for name, value in given.items())),
        *("--tasks", ",".join(TASKS), "--include_path", str(tasks), "--batch_size", str(batch_size)),
        *("--log_samples", "--output_path", str(tmp_path)),
    ]
    subprocess.run(command, check=True, env=environment(tmp_path))
    (report,) = tmp_path.rglob("results_*.json")
    results = json.loads(report.read_text())["results"]
    assert {task: metrics_of(results[task]) for task in TASKS} == {
        task: metrics_of(offline["results"][task]) for task in TASKS
    }
    for task in TASKS:
        (file,) = tmp_path.rglob(f"samples_{task}_*.jsonl")
        samples = [json.loads(line) for line in file.read_text().splitlines()]
        samples.sort(key=lambda sample: sample["doc_id"])
        assert [sample["resps"] for sample in samples] == as_written(offline["samples"][task])


def metrics_of(results):
    """Names and values, without their standard errors."""
    return {name: value for name, value in results.items() if isinstance(value, float) and "stderr" not in name}


def as_written(responses):
    """Responses as lm-eval's files have them: every number in words of its own, which tell all of its bits."""
    return list(map(as_written, responses)) if isinstance(responses, list) else str(responses)


def test_the_model_knows_more_than_chance(offline):
    assert offline["results"]["choice"]["acc,none"] > 0.5
    assert offline["results"]["written"]["exact_match,none"] > 0
