"""Structural tags: which texts each form takes, and how it refuses what it does not know."""

from __future__ import annotations

import pytest

from forerun.errors import RequestError
from tests.grammars import EOS, begin, encode

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}},
    "required": ["n"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
JSON = {"type": "json_schema", "json_schema": SCHEMA}
TAG = {"type": "tag", "begin": "<f>", "content": JSON, "end": "</f>"}
OTHER = {"begin": "<g>/é\U0001f600", "content": {"type": "const_string", "value": "!"}, "end": ""}
CALL, OTHER_CALL = '<f>{"n":1}</f>', "<g>/é\U0001f600!"
MARK = "<|im_start|>"
ANY = {"type": "any_text"}
MANY = {"type": "triggered_tags", "triggers": ["<f"], "tags": [TAG]}


def const(text):
    return {"type": "const_string", "value": text}


def regex(pattern):
    return {"type": "regex", "pattern": pattern}


def json(schema):
    return {"type": "json_schema", "json_schema": schema}


def row(*elements):
    return {"type": "sequence", "elements": elements}


def one_of(*elements):
    return {"type": "or", "elements": elements}


def tag(content, end="</a>"):
    return {"type": "tag", "begin": "<a>", "content": content, "end": end}


def takes(form, text):
    """Whether a text, and its end, is what a format asks for."""
    grammar = begin(structural_tag={"type": "structural_tag", "format": form})
    ids = encode(text)
    return grammar.num_possible([], ids) == len(ids) and bool(grammar.allowed(ids)[EOS])


@pytest.mark.parametrize(
    ("form", "good", "bad"),
    [
        ({"type": "const_string", "value": f"a{MARK}b"}, [f"a{MARK}b"], ["ab", f"a{MARK}", ""]),
        (JSON, ['{"n":12}'], ["{}", '{"n":1} ']),
        ({"type": "regex", "pattern": r"a/\/(b|\n)+"}, ["a//b\nb"], ["a//", "a/b"]),
        ({"type": "any_text"}, ["", "any <f> text\n", f"with {MARK} a mark"], []),
        ({"type": "sequence", "elements": [JSON, {"type": "const_string", "value": ";"}, JSON]}, ['{"n":1};{"n":2}'], ['{"n":1};']),
        ({"type": "or", "elements": [JSON, {"type": "const_string", "value": "no"}]}, ['{"n":1}', "no"], ['no{"n":1}', ""]),
        (TAG, [CALL], ["", f"{CALL} ", "<f>{}</f>"]),
        ({"type": "tag", "begin": "<", "content": {"type": "any_text"}, "end": "/>"}, ["<a b/c>/>", f"<{MARK}/>"], ["<a/>b", "<a"]),
        ({"type": "tag", "begin": "<", "content": {"type": "any_text"}, "end": MARK}, [f"<a b{MARK}"], ["<a", f"<{MARK}a"]),
    ],
)  # fmt: skip
def test_a_form_takes_what_it_says(form, good, bad):
    assert [text for text in good if not takes(form, text)] == []
    assert [text for text in bad if takes(form, text)] == []


@pytest.mark.parametrize(
    ("form", "good", "bad"),
    [
        (tag(regex(r"(.|\n)*")), ["<a>x</a>", "<a>x</a>y</a>"], ["<a>x"]),
        (tag(regex("[^a]+"), end="</b>"), ["<a>x</b>"], ["<a>x", "<a></b>"]),
        (tag(regex(r"(.|\n)*"), end=f"/{MARK}"), [f"<a>x/{MARK}"], [f"<a>x{MARK}"]),
        (row(regex("[0-9]+"), const("0")), ["10", "120", "1200"], ["0", "12"]),
        (row(regex("a|b"), regex("b+"), const("b")), ["abb", "bbbb"], ["ab", "bb"]),
        (tag(one_of(regex("[0-9/<]+"), JSON)), ["<a>1</a>", '<a>{"n":1}</a>'], ["<a></a>"]),
        (row(regex(r"(.|\n)*"), JSON), ['so\n{"n":1}', '{"n":1}'], ["so", "so{"]),
        (row(regex("[a-z]+"), one_of(JSON, {"type": "json_schema", "json_schema": {"type": ["null", "boolean"]}})), ["sotrue", 'so{"n":1}'], ["so"]),
        (row(regex(".*"), {"type": "tags_with_separator", "tags": [TAG], "separator": ","}, JSON), [f'so{CALL}{{"n":1}}', 'so{"n":1}'], ["so"]),
    ],
)  # fmt: skip
def test_a_regex_leaves_what_follows_it(form, good, bad):
    assert [text for text in good if not takes(form, text)] == []
    assert [text for text in bad if takes(form, text)] == []


@pytest.mark.parametrize(
    ("form", "good", "bad"),
    [
        (tag(row(ANY)), ["<a>x</a>", "<a></a>"], ["<a>x", "<a>x</a>y"]),
        (tag(one_of(ANY, const("q"))), ["<a>x</a>", "<a>q</a>"], ["<a>q"]),
        (row(ANY, const("END")), ["xEND", f"{MARK}END"], ["x", "xENDx"]),
        (row(ANY, const("\n"), JSON), ['so\n{"n":1}'], ["so\n", "so\nso"]),
        (row(ANY, TAG), [f"x{CALL}"], ["x", "x<f>"]),
        (tag({"type": "triggered_tags", "triggers": ["<f"], "tags": [TAG]}), [f"<a>x{CALL}y</a>", "<a></a>"], ["<a>x", "<a><f></a>"]),
    ],
)  # fmt: skip
def test_free_text_goes_on_to_the_literal_text_after_it(form, good, bad):
    assert [text for text in good if not takes(form, text)] == []
    assert [text for text in bad if takes(form, text)] == []


@pytest.mark.parametrize("kind", ["triggered_tags", "tags_with_separator"])
@pytest.mark.parametrize("is_only", [False, True])
@pytest.mark.parametrize("end", ["</f>", ""])
def test_a_tag_in_a_list_ends_where_what_follows_begins(kind, is_only, end):
    one = {"type": "tag", "begin": "<f>", "content": regex(r"(.|\n)*"), "end": end}
    own = {"triggers": ["<f"]} if kind == "triggered_tags" else {"separator": ","}
    form = {"type": kind, "tags": [one], "stop_after_first": is_only} | own
    assert takes(tag(form), f"<a><f>x{end}</a>")
    assert not takes(tag(form), f"<a><f>x{end}")


@pytest.mark.parametrize(
    "form",
    [
        row(ANY, JSON),
        row(ANY, {"type": "json_schema", "json_schema": {}}),
        row(ANY, regex("x")),
        row(ANY, one_of(const(MARK), JSON)),
        row({"type": "triggered_tags", "triggers": ["<f"], "tags": [TAG]}, JSON),
        row(regex(".*"), {"type": "json_schema", "json_schema": {}}),
        tag({"type": "triggered_tags", "triggers": ["<"], "tags": [TAG]}),
        row(json({"type": "integer"}), const("5")),
        row(json({"type": ["string", "number"], "minimum": 0, "maximum": 9}), one_of(const("1"), const("2"))),
        tag(json({"type": "integer", "minimum": 0}), end="0</a>"),
    ],
)
def test_a_text_that_could_never_end_is_refused(form):
    with pytest.raises(RequestError, match=r"structural_tag: .*(put a const_string between|contain a trigger)"):
        begin(structural_tag={"type": "structural_tag", "format": form})


@pytest.mark.parametrize(
    ("form", "good", "bad"),
    [
        (row(json({"type": "integer", "minimum": 0, "maximum": 9}), const("5")), ["75"], ["7", "5", "725"]),
        (row(json({"type": "integer", "enum": [1, 12]}), const("5")), ["15", "125"], ["12", "5"]),
        (row(json({"type": "number"}), const("x")), ["1.5x", "-12x"], ["1.5", "x"]),
        (row(json({"type": "integer"}), one_of(const("5"), const("x"))), ["12x", "5x"], ["5"]),
    ],
)
def test_a_number_that_ends_by_itself_may_be_before_anything(form, good, bad):
    assert [text for text in good if not takes(form, text)] == []
    assert [text for text in bad if takes(form, text)] == []


@pytest.mark.parametrize(
    ("more", "good", "bad"),
    [
        ({}, ["", "text", CALL, f"a {CALL} b {OTHER_CALL} c < <h>", f"{MARK}{CALL}{MARK}"], ["<f>", "a <f>b", "<g>x"]),
        ({"at_least_one": True}, [CALL, f"{CALL} b {OTHER_CALL}"], ["", "text", f"a {CALL}"]),
        ({"stop_after_first": True}, ["", "text", f"a {OTHER_CALL}"], [f"{CALL} b", CALL + CALL]),
        ({"at_least_one": True, "stop_after_first": True}, [CALL, OTHER_CALL], ["", "a", f"a {CALL}", CALL + CALL]),
    ],
)
def test_triggers_begin_tags_in_free_text(more, good, bad):
    form = {"type": "triggered_tags", "triggers": ["<f>", "<g"], "tags": [TAG, OTHER], **more}
    assert [text for text in good if not takes(form, text)] == []
    assert [text for text in bad if takes(form, text)] == []


def test_a_mark_triggers_a_tag():
    form = {"type": "triggered_tags", "triggers": [MARK], "tags": [TAG | {"begin": MARK}], "stop_after_first": True}
    assert takes(form, f'say {MARK}{{"n":1}}</f>')
    assert takes(form, "say")
    assert not takes(form, f"say {MARK}")
    assert not takes(form, f'{MARK}{{"n":1}}</f>.')


@pytest.mark.parametrize(
    ("more", "good", "bad"),
    [
        ({}, ["", CALL, f"{CALL}, {OTHER_CALL}, {CALL}"], [f"{CALL}, ", CALL + CALL, "a"]),
        ({"at_least_one": True}, [CALL, f"{CALL}, {CALL}"], [""]),
        ({"at_least_one": True, "stop_after_first": True}, [CALL], ["", f"{CALL}, {CALL}"]),
    ],
)
def test_tags_stand_in_a_row(more, good, bad):
    form = {"type": "tags_with_separator", "tags": [TAG, OTHER], "separator": ", ", **more}
    assert [text for text in good if not takes(form, text)] == []
    assert [text for text in bad if takes(form, text)] == []


@pytest.mark.parametrize(
    "form",
    [
        JSON | {"style": "json"},
        ANY | {"excludes": []},
        {"type": "triggered_tags", "triggers": ["<f"], "tags": [TAG], "at_least_one": False, "stop_after_first": False, "excludes": []},
        {"type": "tags_with_separator", "tags": [TAG], "separator": ",", "at_least_one": False, "stop_after_first": False},
    ],
)  # fmt: skip
def test_what_xgrammar_writes_of_its_defaults_is_taken(form):
    assert takes(form, '{"n":1}' if form["type"] == "json_schema" else "")


def test_the_older_form_means_triggered_tags():
    old = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f"]}
    grammar = begin(structural_tag={"type": "structural_tag", **old})
    for text, is_good in ((f"a {CALL} b", True), ("<f>x", False)):
        ids = encode(text)
        assert (grammar.num_possible([], ids) == len(ids)) is is_good


@pytest.mark.parametrize(
    ("tag", "complaint"),
    [
        ({}, "must have a format"),
        ({"structures": [5], "triggers": ["a"]}, "must have a format"),
        ({"structures": [{"begin": "a", "end": "b"}], "triggers": ["a"]}, "a schema must be an object"),
        ({"format": 5}, "type may be"),
        ({"format": {"type": ["tag"]}}, "type may be"),
        ({"format": {"type": "xml"}}, "type may be"),
        ({"format": {"type": "const_string"}}, "value of a const_string must be a text"),
        ({"format": {"type": "sequence", "elements": []}}, "elements of a sequence must be a list"),
        ({"format": {"type": "sequence", "elements": "ab"}}, "elements of a sequence must be a list"),
        ({"format": {"type": "regex", "pattern": "a\\"}}, "end within an escape"),
        ({"format": {"type": "regex", "pattern": ""}}, "must not be empty"),
        ({"format": {"type": "tag", "begin": "a", "end": "b"}}, "type may be"),
        ({"format": {"type": "tags_with_separator", "tags": [5], "separator": ""}}, "a tag must have a begin"),
        ({"format": {"type": "triggered_tags", "triggers": ["<f", "x"], "tags": [TAG]}}, "each trigger must begin a tag"),
        ({"format": {"type": "triggered_tags", "triggers": ["x"], "tags": [TAG]}}, "each tag must begin with a trigger"),
        ({"format": {"type": "triggered_tags", "triggers": [""], "tags": [TAG]}}, "none of them empty"),
        ({"format": {"type": "triggered_tags", "triggers": ["a"] * 65, "tags": [TAG]}}, "at most 64"),
        ({"format": {"type": "regex", "pattern": "("}}, "cannot be compiled"),
        ({"type": "tag", "format": JSON}, "type must be structural_tag"),
        ({"format": JSON, "formats": JSON}, "no key of structural_tag; did you mean 'format'"),
        ({"format": JSON, "structures": []}, "no key of structural_tag"),
        ({"structures": [], "triggers": ["<f"], "at_least_one": True}, "no key of structural_tag"),
        ({"structures": [{"begin": "<f", "schema": {}, "end": "", "content": ANY}], "triggers": ["<f"]}, "no key of structure;"),
        ({"format": MANY | {"stop_after_frist": True}}, "'stop_after_frist'; .*did you mean 'stop_after_first'"),
        ({"format": MANY | {"tags": [TAG | {"ends": ""}]}}, "no key of tag; did you mean 'end'"),
        ({"format": ANY | {"at_least_one": True}}, "no key of any_text"),
        ({"format": MANY | {"at_least_one": "false"}}, "at_least_one of a triggered_tags must be false or true"),
        ({"format": MANY | {"stop_after_first": 1}}, "stop_after_first of a triggered_tags must be false or true"),
        ({"format": MANY | {"excludes": ["x"]}}, r"excludes of a triggered_tags must be \[\]"),
        ({"format": JSON | {"style": "qwen_xml"}}, 'style of a json_schema must be "json"'),
    ],
)  # fmt: skip
def test_what_is_not_known_is_refused(tag, complaint):
    with pytest.raises(RequestError, match=complaint) as raised:
        begin(structural_tag=tag)
    assert str(raised.value).startswith("structural_tag: ")
    assert len(str(raised.value)) < 500


def test_a_tag_that_is_nested_too_deeply_is_refused():
    form = {"type": "any_text"}
    for _ in range(3000):
        form = {"type": "sequence", "elements": [form]}
    with pytest.raises(RequestError, match=r"structural_tag: .*(deeply|complex|large)"):
        begin(structural_tag={"format": form})
