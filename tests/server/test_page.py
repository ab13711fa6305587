"""The page at /: whom it is shown to, what it may load, and what its script makes of a stream."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tomllib
from html.parser import HTMLParser
from pathlib import Path

import pytest

from forerun.engine.regret import ChoiceAccount, SpeculationReport
from forerun.models.chat.events import Content, Reasoning, TextReader
from forerun.models.chat.reasoning import THINK, Place, ReasoningReader
from forerun.server.page import PAGE, policy_of
from tests.server.served import CHAT, PROMPT, chat_llm, served

ROOT = Path(__file__).parents[2]
TEXT = PAGE.decode()
(SCRIPT,) = re.findall("<script>(.*?)</script>", TEXT, re.S)
NODE = shutil.which("node")
BODY = {"temperature": 0, "max_tokens": 24, "ignore_eos": True, "forerun": {"origins": True}}


def evaluate(code, data=None):
    """What the body of an async function returns that sees the script's functions and `data`."""
    if NODE is None:
        pytest.skip("node is not installed")
    program = f"{SCRIPT}\nconst data = {json.dumps(data)};\n(async () => {{ {code} }})().then((it) => console.log(JSON.stringify(it)))"
    done = subprocess.run([NODE, "-"], input=program, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# --- as it is served ------------------------------------------------------------------------------


def test_it_is_served_to_all_with_a_policy():
    with served(chat_llm(), api_key=("secret",)) as server:
        status, headers, text = server.send("GET", "/")
        assert (status, text) == (200, TEXT)
        assert headers["content-type"] == "text/html; charset=utf-8"
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["content-security-policy"] == policy_of(PAGE)
        assert server.send("GET", "/v1/models")[0] == 401


def test_the_policy_allows_its_own_style_and_script_and_nothing_else():
    policy = dict(part.split(" ", 1) for part in policy_of(PAGE).split("; "))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert re.fullmatch(r"'sha256-[\w+/]{43}='", policy["script-src"])
    assert policy["script-src"] != policy["style-src"]
    changed = policy_of(PAGE.replace(b"</script>", b";</script>"))
    assert policy["script-src"] not in changed
    assert policy["style-src"] in changed


def test_nothing_comes_from_elsewhere():
    assert not re.search(r"https?:|//[\w-]+\.\w|@import|url\(|\bimport\(", TEXT)
    assert set(re.findall(r'(?:src|href)="([^"]*)"', TEXT)) == {"data:,"}


def test_a_models_text_never_becomes_markup():
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", TEXT)
    assert not re.search(r'<[^>]+ (?:style|on\w+)="', TEXT)


class Labels(HTMLParser):
    """The controls of a page, and those that a label or aria-label names."""

    def __init__(self):
        super().__init__()
        self.controls, self.named, self.ids, self.labelling = [], set(), [], False
        self.feed(TEXT)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        if "id" in given:
            self.ids.append(given["id"])
        if tag == "label":
            self.labelling = "for" not in given
            self.named.add(given.get("for"))
        if tag in ("input", "textarea"):
            self.controls.append(given["id"])
            if self.labelling or "aria-label" in given:
                self.named.add(given["id"])

    def handle_endtag(self, tag):
        self.labelling = self.labelling and tag != "label"


def test_every_field_has_a_label_and_every_id_that_the_script_asks_for_is_there():
    page = Labels()
    assert page.controls
    assert set(page.controls) <= page.named
    assert len(page.ids) == len(set(page.ids))
    assert set(re.findall(r'\$\("(\w+)"\)', SCRIPT)) <= set(page.ids)


def test_the_page_is_part_of_the_package():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "page.html" in settings["tool"]["setuptools"]["package-data"]["forerun.server"]


@pytest.mark.parametrize(("server", "method"), [("plain", None), ("drafting", "OracleTreeDrafter, K=4")])
def test_the_models_card_says_whether_there_is_anything_to_switch(request, server, method):
    (card,) = request.getfixturevalue(server).send("GET", "/v1/models")[2]["data"]
    assert card["forerun"] == {"speculation": method}


# --- its script -----------------------------------------------------------------------------------

READ = """
const bytes = new TextEncoder().encode(data.text);
const body = new ReadableStream({ start(into) {
  for (let i = 0; i < bytes.length; i += data.size) into.enqueue(bytes.slice(i, i + data.size));
  into.close();
} });
const chunks = [];
try { for await (const chunk of chunksOf(new Response(body))) chunks.push(chunk); }
catch (error) { return { chunks, error: error.message }; }
return { chunks, error: null };
"""


@pytest.fixture(scope="module")
def stream(drafting):
    """A real stream: its text and its events."""
    body = BODY | {"messages": CHAT, "stream": True}
    text = drafting.send("POST", "/v1/chat/completions", body)[2]
    return text, [json.loads(line[6:]) for line in text.split("\n\n")[:-2]]


@pytest.mark.parametrize("size", [1, 7, 1 << 20])
def test_chunks_are_whole_wherever_the_bytes_are_cut(stream, size):
    text, events = stream
    wide = {"choices": [{"delta": {"content": "é🙂"}}]}
    text = f"data: {json.dumps(wide, ensure_ascii=False)}\n\n{text}"
    assert evaluate(READ, {"text": text, "size": size}) == {"chunks": [wide, *events], "error": None}


def test_an_error_in_a_stream_and_a_cut_stream_are_told(stream):
    text, events = stream
    failing = 'data: {"error": {"message": "it broke"}}\n\ndata: [DONE]\n\n'
    assert evaluate(READ, {"text": failing, "size": 9}) == {"chunks": [], "error": "it broke"}
    cut = evaluate(READ, {"text": text.removesuffix("data: [DONE]\n\n"), "size": 99})
    assert cut == {"chunks": events, "error": "the connection ended before the answer did"}


def test_speed_and_acceptance_are_those_of_the_stream(stream):
    own = [event["choices"][0]["forerun"] for event in stream[1]]
    code = "const t = new Tally(); data.forEach((own, i) => t.add(own, 100 * i)); return [t.speed, t.rate, t.stride, summary(t, true)]"
    speed, rate, stride, line = evaluate(code, own)
    num_tokens = [len(step["origins"]) for step in own]
    num_drafted, num_accepted = (sum(step[f"num_{k}_tokens"] for step in own) for k in ("draft", "accepted"))
    steps = sum(map(bool, num_tokens))
    last = max(i for i, count in enumerate(num_tokens) if count)
    assert sum(num_tokens) == 24
    assert speed == pytest.approx(10 * (24 - num_tokens[0]) / last)
    assert (rate, stride) == pytest.approx((num_accepted / num_drafted, 24 / steps))
    assert line.startswith("speculated, 24 tokens, ")
    counts = f"{num_accepted} of {num_drafted}"
    assert line.endswith(f"{counts} drafted tokens accepted (OracleTreeDrafter {counts})")


def test_each_drafter_has_its_share_of_the_text():
    def step(drafter, num_drafted, num_accepted):
        origins = ["accepted"] * num_accepted + ["bonus"]
        counts = {"num_draft_tokens": num_drafted, "num_accepted_tokens": num_accepted}
        return {"origins": origins, "drafter": drafter, **counts, "by_drafter": {drafter: counts} if drafter else {}}

    steps = [step("prediction", 4, 3), step(None, 0, 0), step("ngram", 2, 0), step("prediction", 5, 2)]
    code = (
        "const t = new Tally(); data.forEach((own, i) => t.add(own, 100 * i));"
        "return [t.share('prediction'), t.share('ngram'), t.share('suffix'), summary(t, true), meaning('prediction', t)]"
    )
    *shares, line, legend = evaluate(code, steps)
    assert shares == pytest.approx([5 / 9, 0, 0])
    assert line.endswith("5 of 11 drafted tokens accepted (prediction 5 of 9, ngram 0 of 2)")
    assert legend == ": accepted, 56 % of the last answer"
    assert evaluate("return meaning('ngram', new Tally())") == ": accepted, 0 % of the last answer"


def test_what_drafts_were_worth_is_read_from_the_servers_metrics(monkeypatch):
    report = SpeculationReport(
        tokens_per_second=182.34, plain_tokens_per_second=90.0, best_static_length=3, regret=0.021
    )
    llm = chat_llm({"method": "ngram", "num_speculative_tokens": 2, "enable_adaptive_verification": True})
    with served(llm) as server:
        monkeypatch.setattr(ChoiceAccount, "report", lambda _: report)
        metrics = server.send("GET", "/metrics")[2]
    assert evaluate("return worth(data)", metrics) == (
        "All answers so far: 182.3 tokens/s with drafts, an estimated 90.0 without (2.03 times); "
        "the best fixed length would be 2 % faster"
    )


def test_what_drafts_were_worth_is_told_of_all_replicas_together():
    figures = {"tokens_per_second": (30.0, 50.0), "plain_tokens_per_second": (20.0, 20.0), "regret": (0.0, 0.04)}
    lines = [
        f'forerun:spec_decode_{name}{{engine="{number}",model_name="m"}} {value}'
        for name, both in figures.items()
        for number, value in enumerate(both)
    ]
    assert evaluate("return worth(data)", "\n".join(lines)) == (
        "All answers so far: 80.0 tokens/s with drafts, an estimated 40.0 without (2.00 times); "
        "the best fixed length would be 2 % faster"
    )


def test_without_a_choice_of_lengths_nothing_is_said_of_its_worth(plain):
    assert evaluate("return worth(data)", plain.send("GET", "/metrics")[2]) == ""


def test_nothing_is_divided_by_zero():
    code = (
        "const t = new Tally(); return [...Object.keys(shown).map((name) => shown[name](t[name])), summary(t, false)]"
    )
    assert evaluate(code) == ["–", "–", "–", "plain, 0 tokens, – tokens/s"]


def test_a_token_says_how_it_came():
    pieces = [
        {"origin": "accepted", "drafter": "suffix", "position": 0},
        {"origin": "recovered", "drafter": "suffix", "position": 2},
        {"origin": "bonus", "drafter": "ngram", "position": 4},
        {"origin": "bonus", "drafter": None, "position": None},
    ]
    assert evaluate("return data.map(describe)", pieces) == [
        "accepted: drafted by suffix, position 1 in its draft",
        "recovered: the target's own, it disagreed with suffix at position 3",
        "bonus: the target's own, after all 4 tokens on the path of ngram's draft",
        "the target's own: this step had no draft",
    ]


TALK = """
class Element {
  children = []; dataset = {}; listeners = {}; classList = { add() {} }; value = ""; textContent = "";
  append(...items) { for (const item of items) { this.children.push(item); if (item.children) item.parent = this; } }
  remove() { this.parent.children.splice(this.parent.children.indexOf(this), 1); }
  replaceChildren() { this.children = []; }
  addEventListener(name, listener) { this.listeners[name] = listener; }
  reportValidity() { return true; }
  setAttribute() {} removeAttribute() {} focus() {} preventDefault() {}
}
const elements = {}, $ = (id) => (elements[id] ??= new Element());
globalThis.document = { getElementById: $, createElement: () => new Element(), addEventListener() {} };
globalThis.sessionStorage = { getItem: () => null };
const bodies = [];
const piece = (text) => ({ text, origin: "bonus", drafter: null, position: null });
const chunkOf = (delta, text) => `data: ${JSON.stringify({ choices: [{ delta, forerun: { origins: [], pieces: text ? [piece(text)] : [], by_drafter: {} } }] })}\\n\\n`;
const chunk = (content) => chunkOf({ content }, content);
const thought = (reasoning_content) => (reasoning_content ? chunkOf({ reasoning_content }, reasoning_content) : "");
globalThis.fetch = async (path, { body }) => {
  if (path === "v1/models") return Response.json({ data: [{ id: "m", forerun: { speculation: null } }] });
  if (path === "metrics") return new Response("");
  bodies.push(JSON.parse(body));
  const { answer, reasoning, cut, error } = data[bodies.length - 1];
  if (answer === null) return Response.json({ error: { message: "too long", ...error } }, { status: 400 });
  return new Response(thought(reasoning) + chunk(answer) + (cut ? "" : "data: [DONE]\\n\\n"));
};
const settled = async () => { do await new Promise((then) => setTimeout(then, 5)); while ($("send").disabled); };
const ask = (text) => { $("prompt").value = text; $("ask").listeners.submit($("ask")); return settled(); };
const again = () => { $("again").listeners.click(); return settled(); };
const log = () => $("log").children.map((article) => [article.children[0].textContent, article.children.length]);
const said = () => bodies.at(-1).messages.map((message) => message.content);
start();
await settled();
"""


def test_a_refused_question_is_forgotten_and_given_back():
    code = 'await ask("long"); const left = [$("prompt").value, $("notice").textContent, log()];'
    code += 'await ask("short"); return [left, $("prompt").value, said(), log()]'
    left, prompt, said, log = evaluate(TALK + code, [{"answer": None}, {"answer": "yes"}])
    assert left == ["long", "too long", []]
    assert (prompt, said, log) == ("", ["short"], [["you", 2], ["assistant", 3]])


def test_an_answer_that_breaks_off_is_kept():
    code = 'await ask("one"); await ask("two"); return [said(), log()]'
    said, log = evaluate(TALK + code, [{"answer": "half", "cut": True}, {"answer": "whole"}])
    assert said == ["one", "half", "two"]
    assert log == [["you", 2], ["assistant", 3]] * 2


def test_where_another_answer_is_refused_the_one_before_stays():
    code = 'await ask("one"); await again(); const prompt = $("prompt").value; await ask("two"); return [prompt, said(), log()]'
    prompt, said, log = evaluate(TALK + code, [{"answer": "first"}, {"answer": None}, {"answer": "second"}])
    assert (prompt, said) == ("", ["one", "first", "two"])
    assert log == [["you", 2], ["assistant", 3]] * 2


def test_after_an_empty_answer_turns_still_alternate():
    code = 'await ask("one"); await ask("two"); await again(); await ask("three"); return bodies.map((body) => body.messages.map((message) => [message.role, message.content]))'
    bodies = evaluate(TALK + code, [{"answer": ""}, {"answer": "good"}, {"answer": ""}, {"answer": "yes"}])
    one, two = [["user", "one"], ["assistant", ""]], [["user", "two"]]
    assert bodies == [[["user", "one"]], one + two, one + two, [*one, *two, ["assistant", ""], ["user", "three"]]]


def test_a_question_has_a_seed_of_its_own_which_answering_again_keeps():
    code = 'await ask("one"); await again(); await ask("two"); return bodies.map((body) => body.seed)'
    first, same, other = evaluate(TALK + code, [{"answer": "a"}] * 3)
    assert first == same != other


def test_an_empty_field_sends_nothing():
    code = '$("most").value = "8"; $("temperature").value = "0"; await ask("one"); $("most").value = $("temperature").value = "";'
    code += 'await ask("two"); return bodies.map((body) => [body.max_tokens ?? null, body.temperature ?? null])'
    assert evaluate(TALK + code, [{"answer": "a"}, {"answer": "b"}]) == [[8, 0], [None, None]]


def test_where_fewer_tokens_fit_than_the_field_says_as_many_as_fit_are_asked_for():
    code = (
        '$("most").value = "8"; await ask("one"); return [said(), log(), bodies.map((body) => body.max_tokens ?? null)]'
    )
    error = {"code": "context_length_exceeded", "param": "max_tokens"}
    said, log, limits = evaluate(TALK + code, [{"answer": None, "error": error}, {"answer": "yes"}])
    assert (said, log, limits) == (["one"], [["you", 2], ["assistant", 3]], [8, None])


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>\nHm, so.\n</think>\n\nYes, this.", "<think>\nHm, so.\n</think>\n\n", "Yes, this."),
        ("<think></think>Yes.", "<think></think>", "Yes."),
        ("Yes.", "", "Yes."),
        ("  Yes.", "", "  Yes."),
        ("<think>Hm", "<think>Hm", ""),
    ],
)
@pytest.mark.parametrize("size", [1, 3, 100])
def test_pieces_of_reasoning_are_told_from_those_of_the_answer(text, reasoning, content, size):
    reader, steps = ReasoningReader(THINK, Place.START, TextReader()), []
    for begin in range(0, len(text), size):
        part = text[begin : begin + size]
        events = reader.push(part, finished=begin + size >= len(text))
        delta = {
            name: "".join(event.text for event in events if isinstance(event, kind))
            for name, kind in (("reasoning_content", Reasoning), ("content", Content))
        }
        steps.append({"pieces": [{"text": one} for one in part], "delta": delta})
    code = (
        "const split = new Split(), told = { reasoning: '', content: '' };"
        "for (const { pieces, delta } of data) for (const [kind, some] of Object.entries(split.push(pieces, delta)))"
        " told[kind] += some.map((piece) => piece.text).join('');"
        "return told"
    )
    assert evaluate(code, steps) == {"reasoning": reasoning, "content": content}


def test_reasoning_is_shown_above_the_answer_and_goes_back_with_it():
    code = (
        'await ask("one"); const [, body, folding] = $("log").children[1].children; await ask("two");'
        "return [folding.open, folding.children.map((one) => one.textContent), bodies[1].messages[1]]"
    )
    answers = [{"answer": "Yes.", "reasoning": "Hm."}, {"answer": "No."}]
    is_open, texts, sent = evaluate(TALK + code, answers)
    assert (is_open, texts[0]) == (False, "Reasoning")
    assert sent == {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}


def test_each_drafter_keeps_its_colour():
    names = ["suffix", "ngram", "suffix"]
    pieces = [{"origin": "accepted", "drafter": name} for name in names] + [{"origin": "bonus", "drafter": "ngram"}]
    code = "const colours = new Colours(); return data.map((piece) => classesOf(piece, colours))"
    assert evaluate(code, pieces) == [["accepted", "by0"], ["accepted", "by1"], ["accepted", "by0"], ["bonus"]]


def test_a_hybrids_tokens_name_the_drafter_whose_turn_it_was():
    members = [{"method": "ngram", "min_draft_tokens": 2}, {"method": "suffix"}]
    config = {"method": "hybrid", "num_speculative_tokens": 4, "drafters": members}
    with served(chat_llm(config)) as server:
        answer = server.post("/v1/completions", BODY | {"prompt": PROMPT, "max_tokens": 64})
    drafters = {piece["drafter"] for piece in answer["choices"][0]["forerun"]["pieces"]}
    assert drafters - {None}
    assert drafters <= {None, "ngram", "suffix"}
