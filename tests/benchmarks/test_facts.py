"""Questions about facts have one right answer, and are the same each time."""

from collections import Counter

import pytest

from benchmarks import facts as module
from benchmarks.facts import KINDS, MOST_OF_A_KIND, NUM_ANSWERS, Question, read_questions


def test_the_same_questions_come_each_time():
    assert read_questions() == read_questions()


def test_each_kind_has_some_and_none_too_many():
    counts = Counter(question.kind for question in read_questions())
    assert counts.keys() == KINDS.keys()
    assert all(40 < count <= MOST_OF_A_KIND for count in counts.values())


def test_only_the_first_answer_is_right():
    facts = {kind: list(facts_of()) for kind, facts_of in KINDS.items()}
    for question in read_questions():
        right = {f" {answer}" for text, answer in facts[question.kind] if text == question.text}
        assert len(set(question.answers)) == NUM_ANSWERS
        assert [answer in right for answer in question.answers] == [True, False, False, False]


@pytest.mark.parametrize(
    ("kind", "text", "answer"),
    [
        ("cities", "The city of Paris is in", "France"),
        ("country codes", "The two-letter ISO code of the country Norway is", "NO"),
        ("HTTP status codes", "The HTTP status code 404 means", "Not Found"),
        ("media types", "A file whose name ends in .png has the media type", "image/png"),
        ("characters", "The Unicode name of the character é is", "Latin small letter e with acute"),
        ("products", "6 times 7 is", "42"),
    ],
)
def test_facts_are_true(kind, text, answer):
    assert (text, answer) in set(KINDS[kind]())


def test_a_text_with_two_right_answers_never_has_one_of_them_as_a_wrong_one(monkeypatch):
    cities = [("Granada is in", "Spain"), ("Granada is in", "Nicaragua"), *((f"{i} is in", str(i)) for i in range(3))]
    monkeypatch.setattr(module, "KINDS", {"cities": lambda: iter(cities)})
    for question in read_questions():
        assert isinstance(question, Question)
        if question.text == "Granada is in":
            assert not {" Spain", " Nicaragua"} <= set(question.answers)


def test_a_system_without_time_zones_is_told_which_package_has_them(monkeypatch):
    monkeypatch.setattr("zoneinfo.TZPATH", ("/nowhere",))
    with pytest.raises(SystemExit, match=r"iso3166.tab: not in /nowhere; install the system's package tzdata"):
        dict(KINDS["country codes"]())
