"""What is learnt: answers without loops, once each, none of an excluded file, with a vocabulary that covers them."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from forerun.errors import ConfigError
from forerun.train.selection import loops, ngrams, read_excluded, select, whole_text
from forerun.train.texts import WrittenText
from tests.train.target_folder import chat_model


class Words:
    """Every token is a word."""

    def decode(self, ids, *, skip_special_tokens):
        return " ".join(f"word{token}" for token in ids)


def text(number, ids, *spans):
    return WrittenText(number=number, temperature=0.0, token_ids=np.array(ids, dtype=np.uint32), spans=spans)


def several(count, *, length=12):
    chance = random.Random(0)
    return [text(n, [n, *(chance.randrange(90) for _ in range(length))], (3, length)) for n in range(count)]


def selected(texts, **changes):
    return select(texts, **({"vocab_size": 97, "num_draft": 97} | changes))


def test_places_are_those_of_answers_whose_next_token_is_of_the_answer_too():
    (learned,) = selected([text(0, range(20), (4, 8), (12, 15))]).learned
    assert learned.places.tolist() == [4, 5, 6, 12, 13]


def test_the_order_of_texts_does_not_matter():
    texts = several(100)
    one, two = selected(texts), selected(texts[::-1])
    assert [t.token_ids.tolist() for t in one.learned] == [t.token_ids.tolist() for t in two.learned]
    assert [t.number for t in one.held_out] == [t.number for t in two.held_out]
    assert len(one.held_out) == 3


def test_what_is_held_out_is_not_learnt():
    found = selected(several(100))
    held_out = {one.token_ids[0] for one in found.held_out}
    assert held_out.isdisjoint(one.token_ids[0] for one in found.learned)
    assert len(held_out) + len(found.learned) == 100


@pytest.mark.parametrize(("count", "num_held_out"), [(1, 0), (2, 1), (31, 1), (32, 1), (63, 1), (64, 2)])
def test_of_few_texts_one_is_held_out(count, num_held_out):
    found = selected(several(count))
    assert (len(found.held_out), len(found.learned)) == (num_held_out, count - num_held_out)


def test_empty_and_repeated_texts_are_left_out_and_counted():
    texts = [text(0, [5, 6, 7, 8, 9], (2, 5)), text(1, []), text(2, [5, 6, 1, 2, 3], (2, 5)), text(3, range(9), (4, 9))]
    texts.append(text(4, range(10, 20), (4, 9)))  # which is held out
    found = selected(texts)
    assert (len(found.learned), found.num_empty, found.num_repeated) == (2, 1, 1)
    assert found.learned[0].token_ids.tolist() == [5, 6, 7, 8, 9]


def test_answers_without_prompts_are_known_by_all_of_them():
    """Those of a server begin alike: many with the same sixteen words."""
    texts = [text(1 + n, [5, 6, 7, 20 + n // 2, 30, 31], (3, 6)) for n in range(8)]
    assert selected([text(0, [*range(9)], (4, 9)), *texts]).num_repeated == 7
    found = selected([text(0, [*range(9)], (4, 9)), *texts], known_by=whole_text)
    assert found.num_repeated == 4


def test_a_draft_vocabulary_without_room_for_what_is_always_drafted_is_refused():
    with pytest.raises(ConfigError, match="--draft-vocab-size: got 3; must be 5 or more"):
        selected(several(10), num_draft=3, always=[96, 95])


def test_texts_that_share_eight_words_with_an_excluded_file_are_left_out(tmp_path):
    texts = several(10)
    shared = Words().decode(texts[4].token_ids[2:10].tolist(), skip_special_tokens=False)
    path = tmp_path / "evaluation.jsonl"
    path.write_text(json.dumps({"turns": ["other", shared.upper() + "!"]}) + "\n")
    found = selected(texts, tokenizer=Words(), excluded=read_excluded([path]))
    assert found.num_excluded == 1
    assert 4 not in {one.token_ids[0] for one in found.learned}
    path.write_text(json.dumps({"prompt": shared.rpartition(" ")[0] + " other"}))  # seven words of it
    assert selected(texts, tokenizer=Words(), excluded=read_excluded([path])).num_excluded == 0


EIGHT, OTHERS = "a b c d e f g h", "i j k l m n o p"
PROMPTS = [{"turns": [EIGHT, "short"]}, {"prompt": OTHERS}]


def test_a_prompt_of_eight_words_is_found_where_nothing_but_a_special_token_parts_it_from_its_answer():
    tokenizer = chat_model().tokenizer
    ids = tokenizer.encode(f"{EIGHT}<|im_end|>yes and no", add_special_tokens=False)
    texts = [*several(3), text(3, ids, (len(ids) - 9, len(ids)))]
    options = {"vocab_size": 264, "num_draft": 264, "tokenizer": tokenizer}
    assert selected(texts, **options, excluded=frozenset(ngrams(EIGHT))).num_excluded == 1
    assert selected(texts, **options, excluded=frozenset(ngrams(OTHERS))).num_excluded == 0


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("whole.json", json.dumps(PROMPTS, indent=2)),
        ("lines.json", "\n".join(map(json.dumps, PROMPTS))),
        ("lines.jsonl", "\n\n".join(map(json.dumps, PROMPTS)) + "\n"),
        ("marked.jsonl", "\ufeff" + "\n".join(map(json.dumps, PROMPTS))),
        ("lines.txt", f"{EIGHT}\n{OTHERS}\n"),
        (
            "separators.jsonl",
            json.dumps({"prompt": EIGHT.replace(" ", "\u2028")}, ensure_ascii=False) + f'["{OTHERS}"]',
        ),
    ],
)
def test_all_strings_of_an_excluded_file_are_read(tmp_path, name, content):
    path = tmp_path / name
    path.write_text(content, encoding="utf-8")
    assert read_excluded([path]) == ngrams(EIGHT) | ngrams(OTHERS)


@pytest.mark.parametrize(
    ("name", "content"), [("missing.txt", None), ("cut.json", '[{"prompt": "a'), ("no.jsonl", "a b")]
)
def test_an_excluded_file_that_cannot_be_read_is_refused(tmp_path, name, content):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=f"--exclude: cannot read .*{name}"):
        read_excluded([tmp_path / name])


@pytest.mark.parametrize(("name", "content"), [("empty.txt", ""), ("short.jsonl", '{"prompt": "a b c d e f g"}')])
def test_a_file_that_excludes_nothing_is_refused(tmp_path, name, content):
    (tmp_path / "whole.txt").write_text(EIGHT)
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=f"--exclude: .*{name} has no string of 8 words"):
        read_excluded([tmp_path / "whole.txt", tmp_path / name])


def test_ngrams_ignore_case_and_punctuation():
    assert ngrams("A b, c d e f g h") == ngrams("a B c d: e f g H!") == {tuple("abcdefgh")}
    assert ngrams("too few words") == set()


def test_loops_begin_at_the_third_time():
    ids = np.array([9, 8, *[1, 2, 3, 4] * 5, 7])
    assert loops(ids).nonzero()[0].tolist() == list(range(2 + 3 * 4, 2 + 5 * 4))
    assert not loops(np.arange(50)).any()


def test_the_vocabulary_is_of_the_most_frequent_learnt_tokens_and_those_that_are_always_drafted():
    ids = [50] * 5 + [60, *[20, 30] * 10, 40]  # what the prompt repeats does not count
    found = selected([text(0, [7, *chosen], (6, 27)) for chosen in (ids, ids[::-1])][:1], num_draft=7, always=[11])
    assert set(found.draft_ids.tolist()) > {0, 1, 2, 11, 20, 30}
    assert 50 not in found.draft_ids
    assert found.draft_ids.tolist() == sorted(found.draft_ids)
    assert found.coverage == 1.0


def test_a_vocabulary_that_covers_too_little_is_refused():
    with pytest.raises(ConfigError, match=r"--draft-vocab-size: 5 tokens are .*; at least 95% are needed"):
        selected(several(20), num_draft=5)


def test_nothing_left_to_learn_is_said_with_the_reasons():
    short = [1, 2, 3]  # whose answer of one token teaches nothing
    texts = [text(0, []), text(1, short, (2, 3)), text(2, short, (2, 3))]
    with pytest.raises(ConfigError, match=r"none is left to learn from .3 written, 1 without an answer, 1 repeated"):
        selected(texts)
