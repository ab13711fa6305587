"""`forerun generate`: continues one prompt."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from forerun.cli import loading
from forerun.cli.answer import Answer, hide, read_answer
from forerun.cli.command import command
from forerun.cli.options import EngineOptions, Flag, JsonFlag, SamplingOptions
from forerun.cli.speculation_figures import speculation_json
from forerun.core.outputs import StreamDelta
from forerun.errors import ModelError, RequestError

if TYPE_CHECKING:
    from forerun import LLM
    from forerun.cli.chat_answer import ChatAnswer

StdinFlag = Annotated[bool, Parameter(name="-", negative=(), show_default=False)]
SAMPLING, ENGINE = SamplingOptions(), EngineOptions()


@command
def generate(
    model: str,
    prompt: str | None = None,
    /,
    *,
    from_stdin: StdinFlag = False,
    chat: Flag = False,
    stream: bool = True,
    json_output: JsonFlag = False,
    sampling: SamplingOptions = SAMPLING,
    engine: EngineOptions = ENGINE,
) -> None:
    """Write the continuation of a prompt to standard output.

    Drafting never changes the text, only how soon it is there.

    Args:
        model: A folder, a .gguf file, a known name (see "forerun models list") or a hub id org/name.
        prompt: The text to continue; one that starts with a hyphen comes last, after all options and --.
        from_stdin: Read the prompt from standard input, without its last line break.
        chat: Take the prompt as a user's message and answer it by the model's chat template; what the model thinks first goes
            to standard error.
        stream: Show text as it is written, instead of all at the end.
        json_output: Print one line of JSON for machines, and nothing else, on standard output.

    Examples:
        forerun generate smollm2-135m "The capital of France is" --max-tokens 10
        forerun generate smollm2-135m --chat "Name three colours."
        cat notes.txt | forerun generate smollm2-135m - --json
        forerun generate smollm2-135m --max-tokens 8 -- "- a list"
        forerun generate smollm2-135m "1 2 3 1 2 3" --speculative-config.method suffix
        forerun generate smollm2-135m "1 2 3" --temperature 0.7 --seed 1 \\
            --speculative-config '{"method": "ngram", "num_speculative_tokens": 5}'
    """
    text = _prompt(prompt, from_stdin)
    params = sampling.params()
    llm = loading.load_llm(model, engine)
    if chat and not llm.get_tokenizer().has_chat_template:
        raise ModelError(f"--chat: {model} has no chat template, which says how to put a question to it; leave it out")
    is_shown = stream and not json_output
    said: ChatAnswer | None = None
    if chat:
        from forerun.cli.chat_answer import ask  # here: most starts need none of it

        deltas, said = ask(llm, [{"role": "user", "content": text}], params, is_shown=is_shown)
        answer = read_answer(deltas, said.add)
        answer.text = said.content
    else:
        answer = read_answer(llm.stream(text, params), _write if is_shown else hide)
    if json_output:
        print(json.dumps(_report(model, text, answer, llm) | ({} if said is None else {"reasoning": said.reasoning})))
        return
    if not stream and said is not None:
        said.show()
    print("" if stream or said is not None else answer.text, flush=True)
    is_empty = not answer.text and (said is None or not said.reasoning)
    if is_empty and answer.finish_reason == "stop":
        how = "" if chat else "; --chat asks it as a user does"
        print(f"{model}: the text is empty, the model ended it at once{how}", file=sys.stderr)


def _prompt(given: str | None, from_stdin: bool) -> str:
    if given is not None and from_stdin:
        raise RequestError("PROMPT and - are both given; keep one of them")
    if given is not None:
        return given
    if not from_stdin:
        raise RequestError("PROMPT is missing; give a text in quotes, or - to read it from standard input")
    return sys.stdin.read().removesuffix("\n")


def _write(delta: StreamDelta) -> None:
    sys.stdout.write(delta.text)
    sys.stdout.flush()


def _report(model: str, prompt: str, answer: Answer, llm: LLM) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": prompt,
        "text": answer.text,
        "token_ids": answer.token_ids,
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
        "seconds": answer.seconds,
        "first_token_seconds": answer.first_token_seconds,
        "tokens_per_second": answer.tokens_per_second,
        "speculative": llm.speculative.describe(),
        "speculation": speculation_json(llm.stats.speculation),
    }
