"""Questions with four answers, as MMLU has them, about facts that Python and the system's time zones know.

They stand in for MMLU where no data set may be used: knowledge that a model can only have from training, of six kinds, each
question with one right answer and three that are right for other questions of its kind. They are easier than MMLU's, and a
share of right answers here is no share there; what they show is how many answers rounding a model's weights changes.
"""

from __future__ import annotations

import mimetypes
import random
import unicodedata
import zoneinfo
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

NUM_ANSWERS = 4
MOST_OF_A_KIND = 150
CHARACTERS = (*range(0x21, 0x180), *range(0x370, 0x460))  # Latin, Greek and Cyrillic letters, and signs
TIMES = range(2, 16)
COUNTRIES, CITIES = "iso3166.tab", "zone.tab"  # of the time zone database, which is in the public domain
NOBODYS = "AQ"  # Antarctica, whose stations are no cities


@dataclass(frozen=True, slots=True)
class Question:
    """A text and what may follow it: the right answer first, each with the space before it."""

    kind: str
    text: str
    answers: tuple[str, ...]


Fact = tuple[str, str]
"""A text, and the answer that ends it."""


def read_questions() -> list[Question]:
    """All questions, the same ones wherever Python and the time zones are of the same versions.

    Raises:
        SystemExit: the system has no time zones.
    """
    questions = []
    for kind, facts_of in KINDS.items():
        chance = random.Random(0)
        facts = list(dict.fromkeys(facts_of()))
        all_answers = sorted({answer for _, answer in facts})
        for text, answer in chance.sample(facts, min(len(facts), MOST_OF_A_KIND)):
            right = {other for same, other in facts if same == text}
            wrong = chance.sample([other for other in all_answers if other not in right], NUM_ANSWERS - 1)
            questions.append(Question(kind, text, tuple(f" {one}" for one in (answer, *wrong))))
    return questions


def _cities() -> Iterator[Fact]:
    countries = dict(_rows(COUNTRIES))
    for code, _, zone, *_ in _rows(CITIES):
        city, country = zone.rpartition("/")[2].replace("_", " "), countries[code]
        if code != NOBODYS and city not in country and country not in city:
            yield f"The city of {city} is in", country


def _country_codes() -> Iterator[Fact]:
    for code, country in _rows(COUNTRIES):
        yield f"The two-letter ISO code of the country {country} is", code


def _status_codes() -> Iterator[Fact]:
    for status in HTTPStatus:
        yield f"The HTTP status code {status.value} means", status.phrase


def _media_types() -> Iterator[Fact]:
    for ending, media_type in mimetypes.MimeTypes().types_map[True].items():
        yield f"A file whose name ends in {ending} has the media type", media_type


def _characters() -> Iterator[Fact]:
    for character in map(chr, CHARACTERS):
        if name := unicodedata.name(character, ""):
            yield f"The Unicode name of the character {character} is", name.capitalize()


def _products() -> Iterator[Fact]:
    for first in TIMES:
        for second in TIMES:
            yield f"{first} times {second} is", str(first * second)


KINDS: dict[str, Callable[[], Iterator[Fact]]] = {
    "cities": _cities,
    "country codes": _country_codes,
    "HTTP status codes": _status_codes,
    "media types": _media_types,
    "characters": _characters,
    "products": _products,
}
"""The facts of each kind."""


def _rows(name: str) -> list[list[str]]:
    """The rows of a table of the time zone database, by column."""
    found = next((file for folder in zoneinfo.TZPATH if (file := Path(folder, name)).exists()), None)
    if found is None:
        raise SystemExit(f"{name}: not in {', '.join(zoneinfo.TZPATH)}; install the system's package tzdata")
    lines = found.read_text(encoding="utf-8").splitlines()
    return [line.split("\t") for line in lines if line and not line.startswith("#")]
