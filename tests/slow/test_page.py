"""The page in a headless Chromium, on real weights.

Needs `pip install -e '.[browser]'` and a Chromium: on the path, or from `playwright install chromium`.
"""

from __future__ import annotations

import shutil
from urllib.parse import urlsplit

import pytest

from forerun import LLM
from tests.server.served import served

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MODEL = "smollm2-135m"
PROMPT = "Write a Python function that adds two numbers, then the same function with a docstring."
DRAFTERS = [
    {"method": "suffix", "min_draft_tokens": 4},
    {"method": "self", "quantization": "int8", "num_speculative_tokens": 4},
]
HYBRID = {"method": "hybrid", "num_speculative_tokens": 8, "drafters": DRAFTERS}
NAMES = ["chromium", "chromium-browser", "google-chrome"]
BACKGROUND = "getComputedStyle(document.body).backgroundColor"


@pytest.fixture(scope="module")
def server():
    with served(LLM(MODEL, max_model_len=2048, speculative_config=HYBRID), served_model_name=MODEL) as it:
        yield it


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        binary = next(filter(None, map(shutil.which, NAMES)), None)
        try:
            it = driver.chromium.launch(executable_path=binary, args=["--no-sandbox"])
        except playwright.Error as error:
            pytest.skip(f"no Chromium: {error.message.splitlines()[0]}")
        yield it
        it.close()


@pytest.fixture
def tab(browser, server):
    """The page, ready; afterwards: it asked nobody else, and nothing went wrong in it."""
    tab = browser.new_page(viewport={"width": 1000, "height": 900}, color_scheme="light")
    hosts, faults = set(), []
    tab.on("request", lambda request: hosts.add(urlsplit(request.url).netloc))
    tab.on("console", lambda message: faults.append(message.text) if message.type in ("error", "warning") else None)
    tab.on("pageerror", lambda error: faults.append(str(error)))
    tab.goto(server.url)
    tab.wait_for_selector("#send:enabled")
    yield tab
    tab.close()
    assert hosts <= {urlsplit(server.url).netloc, ""}
    assert faults == []


def ask(tab, text=PROMPT):
    tab.fill("#prompt", text)
    tab.press("#prompt", "Enter")
    return answered(tab)


def answered(tab):
    """The last answer's element, when it is whole."""
    tab.wait_for_selector("article:last-child .quiet", timeout=120_000)
    return tab.locator("article:last-child .text")


def is_idle(server):
    scheduler = server.llm.engine.parts.scheduler
    return not (scheduler.waiting or scheduler.running)


def test_speculation_shows_and_changes_nothing_of_the_text(tab, tmp_path):
    tab.fill("#most", "110")
    speculated = ask(tab)
    text = speculated.text_content()
    assert set(tab.locator("#legend .accepted").all_inner_texts()) == {"self", "suffix"}
    assert speculated.locator(".accepted").count() > 20
    assert 0 < int(tab.inner_text("#rate").removesuffix(" %")) <= 100
    assert float(tab.inner_text("#speed")) > 0
    assert float(tab.inner_text("#stride")) > 1
    speculated.locator(".accepted").last.hover()
    tab.screenshot(path=tmp_path / "page.png")  # docs/images/page.png

    tab.uncheck("#speculate")
    tab.click("#again")
    tab.wait_for_selector("article:nth-child(3) .quiet", timeout=120_000)
    plain = tab.locator("article:nth-child(3) .text")
    assert plain.text_content() == text
    assert plain.locator(".accepted, .recovered").count() == 0
    assert tab.inner_text("#rate") == "–"
    assert tab.inner_text("article:nth-child(3) .quiet").startswith("plain, ")


def test_a_token_tells_how_it_came_to_mouse_and_keyboard(tab):
    answer = ask(tab)
    answer.locator(".accepted").nth(4).hover()
    tip = tab.locator("#tip")
    assert tip.is_visible()
    assert tip.inner_text().startswith("accepted: drafted by ")
    tab.locator("h1").hover()
    assert tip.is_hidden()

    answer.locator("span").first.focus()
    tab.keyboard.press("End")
    assert tip.is_visible()
    last = answer.locator("span").last
    assert last.evaluate("(token) => token === document.activeElement")
    assert last.get_attribute("aria-describedby") == "tip"
    assert tip.inner_text() == last.get_attribute("data-tip")
    tab.keyboard.press("ArrowLeft")
    assert not last.evaluate("(token) => token === document.activeElement")
    tab.keyboard.press("Escape")
    assert tip.is_hidden()


@pytest.mark.parametrize("stop", ["button", "Escape"])
def test_an_answer_can_be_stopped(tab, server, stop):
    tab.fill("#most", "1800")
    tab.fill("#prompt", "Write a very long story about the sea, in twenty chapters.")
    tab.click("#send")
    tab.wait_for_selector("article:last-child .text span")
    if stop == "button":
        tab.click("#stop")
    else:
        tab.keyboard.press("Escape")
    answered(tab)
    tab.wait_for_selector("#send:enabled")
    tab.wait_for_timeout(500)
    assert is_idle(server)
    assert tab.inner_text("#notice") == ""


def test_the_servers_words_are_shown_when_it_refuses(browser, server):
    tab = browser.new_page()
    tab.goto(server.url)
    tab.wait_for_selector("#send:enabled")
    tab.fill("#prompt", "word " * 3000)
    tab.press("#prompt", "Enter")
    tab.wait_for_selector("#notice:not(:empty)")
    assert "maximum context length" in tab.inner_text("#notice")
    tab.wait_for_selector("article", state="detached")
    assert tab.input_value("#prompt") == "word " * 3000
    assert ask(tab, "Hello").text_content(), "what was refused is not sent again"
    tab.close()


def test_it_is_dark_where_that_is_preferred(tab):
    light = tab.evaluate(BACKGROUND)
    tab.emulate_media(color_scheme="dark")
    assert tab.evaluate(BACKGROUND) != light


def test_a_key_is_asked_for_where_one_is_needed(browser):
    with served(LLM(MODEL, max_model_len=256), served_model_name=MODEL, api_key=("secret",)) as server:
        tab = browser.new_page()
        tab.goto(server.url)
        tab.wait_for_selector("#key")
        assert tab.locator("#send").is_disabled()
        tab.fill("#key", "secret")
        tab.press("#key", "Enter")
        tab.wait_for_selector("#send:enabled")
        assert tab.locator("#key").is_hidden()
        assert tab.locator("#speculate").is_disabled()
        tab.fill("#most", "8")
        assert ask(tab, "Hello").text_content()
        tab.close()
