"""Datasets: lengths, seeds, shared prefixes, files and refusals."""

from __future__ import annotations

import json

import pytest

from forerun.bench.load.requests import draw_requests
from forerun.bench.load.workload import Dataset
from forerun.errors import ConfigError
from forerun.models.tokenizer import load_tokenizer
from tests.tiny_tokenizer import save_tiny_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(save_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
def write(tmp_path):
    """A file of JSON lines; its path."""

    def write(*records, name="file.jsonl"):
        (tmp_path / name).write_text("\n".join(map(json.dumps, records)) + "\n")
        return tmp_path / name

    return write


def texts(requests):
    return [request.prompt for request in requests]


def test_random_prompts_have_their_length_as_text(tokenizer):
    requests = draw_requests(Dataset(input_len=20, output_len=7), tokenizer, 5)
    assert {request.num_prompt_tokens for request in requests} == {20}
    assert [len(tokenizer.encode(request.prompt)) for request in requests] == [20] * 5
    assert {request.output_len for request in requests} == {7}
    assert len(set(texts(requests))) == 5


def test_random_lengths_vary_within_their_ranges(tokenizer):
    dataset = Dataset(random_input_len=20, random_output_len=10, random_range_ratio='{"input": 0.5, "output": 0.2}')
    requests = draw_requests(dataset, tokenizer, 60)
    inputs, outputs = ({getattr(one, name) for one in requests} for name in ("num_prompt_tokens", "output_len"))
    assert (min(inputs) >= 10, max(inputs) <= 30, len(inputs) > 5) == (True, True, True)
    assert outputs == set(range(8, 13))


def test_a_seed_decides_and_more_prompts_only_add(tokenizer):
    def draw(count, seed=0):
        return draw_requests(Dataset(input_len=12, seed=seed, random_range_ratio="0.5"), tokenizer, count)

    assert draw(5)[:3] == draw(3)
    assert draw(3, seed=1) != draw(3)


def test_random_prompts_may_share_a_beginning(tokenizer):
    requests = draw_requests(Dataset(input_len=8, random_prefix_len=6), tokenizer, 4)
    encoded = [tokenizer.encode(request.prompt) for request in requests]
    assert {len(ids) for ids in encoded} == {14}
    assert len({tuple(ids[:6]) for ids in encoded}) == 1


def test_prefixes_are_repeated_in_turn(tokenizer):
    dataset = Dataset(
        dataset_name="prefix_repetition",
        prefix_repetition_prefix_len=12,
        prefix_repetition_suffix_len=8,
        prefix_repetition_num_prefixes=3,
        num_prompts=8,
    )
    requests = draw_requests(dataset, tokenizer, 8)
    prefixes = [tuple(tokenizer.encode(text)[:10]) for text in texts(requests)]
    assert sorted(prefixes.count(prefix) for prefix in set(prefixes)) == [2, 3, 3]
    assert len(set(texts(requests))) == 8


def test_warm_ups_change_no_request_that_is_measured(tokenizer):
    dataset = Dataset(
        dataset_name="prefix_repetition",
        prefix_repetition_prefix_len=6,
        prefix_repetition_suffix_len=4,
        num_prompts=12,
    )
    assert draw_requests(dataset, tokenizer, 15)[:12] == draw_requests(dataset, tokenizer, 12)


def test_conversations_are_texts_with_the_answers_length(tokenizer, tmp_path):
    turns = [[{"value": f"question {n}"}, {"value": "an answer" * n}] for n in range(1, 4)]
    (tmp_path / "f.json").write_text(json.dumps([{"conversations": pair} for pair in turns]))
    dataset = Dataset(dataset_name="sharegpt", dataset_path=tmp_path / "f.json", disable_shuffle=True)
    requests = draw_requests(dataset, tokenizer, 2)
    assert [(one.prompt, one.num_prompt_tokens, one.output_len) for one in requests] == [
        ("question 1", 10, 9),
        ("question 2", 10, 18),
    ]


def test_custom_prompts_are_laid_out_for_completions_and_left_alone_for_chat(tokenizer, write):
    dataset = Dataset(dataset_name="custom", dataset_path=write({"prompt": "hi"}), output_len=5)
    assert dataset.needs_tokenizer(chat=False)
    assert not dataset.needs_tokenizer(chat=True)
    (laid_out,) = draw_requests(dataset, tokenizer, 1)
    assert laid_out.prompt == tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    (plain,) = draw_requests(dataset, None, 1)
    assert (plain.prompt, plain.output_len, plain.num_prompt_tokens) == ("hi", 5, None)


def test_custom_lengths_may_be_the_lines(write):
    path = write({"prompt": "a", "output_tokens": 3}, {"prompt": "b", "output_tokens": 4})
    dataset = Dataset(dataset_name="custom", dataset_path=path, custom_output_len=-1, disable_shuffle=True)
    assert [one.output_len for one in draw_requests(dataset, None, 2)] == [3, 4]


def test_spec_bench_takes_first_turns_of_a_category(write):
    path = write(
        {"category": "qa", "turns": ["one", "two"]},
        {"category": "math", "turns": ["three"]},
        {"category": "qa", "turns": ["four"]},
    )
    dataset = Dataset(dataset_name="spec_bench", dataset_path=path, spec_bench_category="qa", disable_shuffle=True)
    assert texts(draw_requests(dataset, None, 2)) == ["one", "four"]


def test_a_short_files_prompts_are_repeated_unless_no_oversample_is_set(write, caplog):
    path = write({"prompt": "a"}, {"prompt": "b"})
    again = draw_requests(Dataset(dataset_name="custom", dataset_path=path), None, 5)
    assert len(again) == 5
    assert set(texts(again)) == {"a", "b"}
    assert "has 2 fitting prompts: 3 are sent again" in caplog.text
    assert len(draw_requests(Dataset(dataset_name="custom", dataset_path=path, no_oversample=True), None, 5)) == 2


@pytest.mark.parametrize(
    ("settings", "hint"),
    [
        ({"num_prompts": 0}, "num_prompts: got 0; must be 1 or more"),
        ({"dataset_name": "custom"}, "dataset_path, with dataset_name 'custom': missing; give a file"),
        ({"dataset_path": "f.json"}, "dataset_path, with dataset_name 'random': got f.json; leave it out"),
        ({"random_range_ratio": "1.0"}, "random_range_ratio: got '1.0'; must be a number from 0 to below 1"),
        ({"random_range_ratio": "x"}, "random_range_ratio: got 'x'"),
        ({"spec_bench_category": "qa"}, "spec_bench_category: given with dataset_name 'random'"),
        ({"skip_chat_template": True}, "skip_chat_template: given with dataset_name 'random'"),
        ({"no_oversample": True}, "no_oversample: given with dataset_name 'random'"),
        ({"disable_shuffle": True}, "disable_shuffle: given with dataset_name 'random'"),
        ({"output_len": 5, "random_output_len": 6}, "output_len: got 5, and random_output_len 6, which is the same"),
        ({"input_len": 5, "random_input_len": 6}, "input_len: got 5, and random_input_len 6, which is the same"),
        (
            {"dataset_name": "prefix_repetition", "input_len": 5},
            "input_len: given with dataset_name 'prefix_repetition'",
        ),
        (
            {"dataset_name": "prefix_repetition", "num_prompts": 9},
            "num_prompts: got 9; must be 10, the number of prefixes",
        ),
    ],
)
def test_datasets_that_cannot_be_are_refused(settings, hint):
    with pytest.raises(ConfigError) as caught:
        Dataset(**settings)
    assert hint in str(caught.value)


@pytest.mark.parametrize(
    ("name", "line", "hint"),
    [
        ("custom", "nonsense", "line 1 is not JSON"),
        ("custom", "[1]", "line 1: got a list; must be an object"),
        ("custom", "{}", 'line 1: no text under "prompt"'),
        ("spec_bench", '{"turns": []}', 'line 1: no list of texts under "turns"'),
        ("custom", "", "is empty"),
    ],
)
def test_a_file_that_is_wrong_is_named_with_its_line(name, line, hint, tmp_path):
    (tmp_path / "f.jsonl").write_text(line)
    with pytest.raises(ConfigError, match=hint):
        draw_requests(Dataset(dataset_name=name, dataset_path=tmp_path / "f.jsonl"), None, 1)


def test_a_category_that_is_not_there_names_those_that_are(write):
    path = write({"category": "math", "turns": ["x"]})
    with pytest.raises(ConfigError, match=r"spec_bench_category: got 'qa'; .* has math"):
        draw_requests(Dataset(dataset_name="spec_bench", dataset_path=path, spec_bench_category="qa"), None, 1)


def test_a_length_that_the_lines_do_not_have_is_asked_for(write):
    dataset = Dataset(dataset_name="custom", dataset_path=write({"prompt": "a"}), custom_output_len=-1)
    with pytest.raises(ConfigError, match='no number above 0 under "output_tokens"'):
        draw_requests(dataset, None, 1)
