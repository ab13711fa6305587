"""`forerun demo`: answers one prompt with and without drafts, and compares speed and text."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

import forerun
from forerun.cli import loading
from forerun.cli.answer import Answer, Show, hide, read_answer
from forerun.cli.command import command
from forerun.cli.console import plain_console, spinner
from forerun.cli.options import EngineOptions, JsonFlag
from forerun.cli.speculation_figures import speculation_json, speculation_rows
from forerun.core.outputs import Origin, StreamDelta
from forerun.core.stats import SpeculationStats
from forerun.errors import ConfigError
from forerun.server.origins import TokenSpans

if TYPE_CHECKING:
    from forerun import LLM

ENGINE = EngineOptions()
DEFAULT_MODEL = "smollm2-135m"
DEFAULT_SPECULATION = "auto"
WARM_UP_TOKENS = 16
TEXTS_DIFFER = 1

ACCEPTED_STYLE = "bold green"
LEGEND = Text.assemble(("accepted draft tokens", ACCEPTED_STYLE), ", the target's own tokens")

PROMPT = """```python
class Shelf:
    def __init__(self, name, capacity):
        self.name = name
        self.capacity = capacity
        self.items = {}

    def total(self):
        return sum(self.items.values())

    def add(self, item, qty):
        if self.total() + qty > self.capacity:
            raise ValueError("the shelf is full")
        self.items[item] = self.items.get(item, 0) + qty
```

Repeat the code above exactly, but rename the class from Shelf to Rack."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The answers to one prompt without and with drafts."""

    plain: Answer
    speculated: Answer
    speculation: SpeculationStats
    num_prompt_tokens: int

    @property
    def identical(self) -> bool:
        """Whether the two texts are identical."""
        return self.plain.text == self.speculated.text

    @property
    def speed_up(self) -> float:
        """Tokens per second with drafts / without."""
        plain = self.plain.tokens_per_second
        return self.speculated.tokens_per_second / plain if plain else 0.0


@command
def demo(
    model: str = DEFAULT_MODEL,
    /,
    *,
    max_tokens: int = 256,
    json_output: JsonFlag = False,
    engine: EngineOptions = ENGINE,
) -> int:
    """Answer a built-in prompt without and with drafts, and compare speed and text.

    The exit code is 1 if the two texts differ, which they never should.

    Args:
        model: A folder, a .gguf file, a known name (see "forerun models list") or a hub id org/name.
        max_tokens: Tokens to write in each run, at most.
        json_output: Print one line of JSON for machines, and nothing else, on standard output.

    Examples:
        forerun demo
        forerun demo --speculative-config.method suffix
        forerun demo ./my-model --max-tokens 100 --json
    """
    if max_tokens < 1:
        raise ConfigError(f"--max-tokens: got {max_tokens}; must be 1 or more")
    options = engine.with_default_speculation(DEFAULT_SPECULATION, need="the demo shows what drafts gain")
    llm = loading.load_llm(model, options)
    console = plain_console(quiet=json_output)
    comparison = compare(llm, console, max_tokens=max_tokens)
    if json_output:
        print(json.dumps({"model": model} | as_json(comparison, llm.speculative.describe())))
    else:
        console.print(as_table(comparison))
    return 0 if comparison.identical else TEXTS_DIFFER


class TokenPainter:
    """Prints the deltas of one completion, each token's text in the style of its origin.

    `push` returns the text that became certain with the next token, as `TextStream.push` does.
    """

    def __init__(self, console: Console, push: Callable[[int], str]) -> None:
        self._console = console
        self._spans: TokenSpans[Origin] = TokenSpans(push)

    def __call__(self, delta: StreamDelta) -> None:
        """Print what a delta brought."""
        spans = self._spans.cut(delta.text, zip(delta.token_ids, delta.origins, strict=True))
        for accepted, run in groupby(spans, key=lambda span: span[1] is Origin.ACCEPTED):
            text = "".join(span for span, _ in run)
            self._console.out(text, style=ACCEPTED_STYLE if accepted else None, end="", highlight=False)


def compare(llm: LLM, console: Console, *, max_tokens: int) -> Comparison:
    """Answer the prompt plainly, then with drafts, showing both answers as they are written."""
    prompt_ids = list(llm.get_tokenizer().apply_chat_template([{"role": "user", "content": PROMPT}]))
    with_drafts = {"temperature": 0.0, "max_tokens": max_tokens}
    without = with_drafts | {"speculation": "off"}
    with spinner("Warming up"):
        for params in (without, with_drafts):
            short = params | {"max_tokens": min(max_tokens, WARM_UP_TOKENS)}
            _answer(llm, prompt_ids, short, salt="warm-up", show=hide)
    console.rule("without drafts")
    plain = _answer(llm, prompt_ids, without, salt="plain", show=_writer(console))
    console.print()
    console.rule(f"with drafts: {llm.speculative.describe()}")
    if console.is_terminal:
        console.print(LEGEND)
    llm.reset_stats()
    from forerun.models.tokenizer import TextStream  # here, as a command's options must not wait for it

    painter = TokenPainter(console, TextStream(llm.get_tokenizer(), prompt_ids).push)
    speculated = _answer(llm, prompt_ids, with_drafts, salt="speculated", show=painter)
    console.print()
    speculation = llm.stats.speculation.copy()
    return Comparison(plain=plain, speculated=speculated, speculation=speculation, num_prompt_tokens=len(prompt_ids))


def as_json(comparison: Comparison, speculative: str) -> dict[str, Any]:
    """The comparison as JSON."""
    return {
        "speculative": speculative,
        "num_prompt_tokens": comparison.num_prompt_tokens,
        "plain": _answer_json(comparison.plain),
        "speculated": _answer_json(comparison.speculated),
        "speculation": speculation_json(comparison.speculation),
        "speed_up": comparison.speed_up,
        "identical": comparison.identical,
    }


def as_table(comparison: Comparison) -> Table:
    """The comparison as a table."""
    plain, speculated = comparison.plain, comparison.speculated
    table = Table("", "without drafts", "with drafts")
    table.add_row("tokens", str(len(plain.token_ids)), str(len(speculated.token_ids)))
    table.add_row("seconds", f"{plain.seconds:.2f}", f"{speculated.seconds:.2f}")
    table.add_row("first token after (s)", _seconds(plain), _seconds(speculated))
    table.add_row("tokens/s", f"{plain.tokens_per_second:.1f}", f"{speculated.tokens_per_second:.1f}")
    table.add_row("speed-up", "1.00x", f"{comparison.speed_up:.2f}x")
    for name, value in speculation_rows(comparison.speculation):
        table.add_row(name, "", value)
    table.add_row("texts identical", "", "yes" if comparison.identical else "NO")
    return table


def _answer(llm: LLM, prompt_ids: list[int], params: dict[str, Any], *, salt: str, show: Show) -> Answer:
    """Run the prompt once; runs of different salts share neither KV blocks nor what a drafter remembers."""
    prompt = {"prompt_token_ids": prompt_ids, "cache_salt": salt}
    return read_answer(llm.stream(prompt, forerun.SamplingParams(**params)), show)


def _writer(console: Console) -> Show:
    def write(delta: StreamDelta) -> None:
        console.out(delta.text, end="", highlight=False)

    return write


def _seconds(answer: Answer) -> str:
    return "-" if answer.first_token_seconds is None else f"{answer.first_token_seconds:.2f}"


def _answer_json(answer: Answer) -> dict[str, Any]:
    return {
        "text": answer.text,
        "num_tokens": len(answer.token_ids),
        "seconds": answer.seconds,
        "first_token_seconds": answer.first_token_seconds,
        "tokens_per_second": answer.tokens_per_second,
    }
