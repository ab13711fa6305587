"""The program as a whole: its commands and flags, errors and exit codes."""

from __future__ import annotations

import errno
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cyclopts import App
from rich.console import Console, ConsoleDimensions

import forerun
from forerun.cli import loading
from forerun.cli.app import build_app, main
from forerun.cli.command import examples
from forerun.errors import ModelError
from tests.cli.fakes import FakeLoader

DOCS = Path(__file__).parents[2] / "docs" / "commands"
EVERYWHERE = {"--help", "-h", "--version"}
PAGES = {
    "bench": ("bench compare", "bench curve", "bench latency", "bench throughput", "bench replay", "bench serve"),
    "chat": ("chat",),
    "collect-env": ("collect-env",),
    "demo": ("demo",),
    "deploy": ("deploy ray", "deploy ray-stop"),
    "drafters": ("drafters",),
    "dynamo-worker": ("dynamo-worker",),
    "emit": ("emit",),
    "generate": ("generate",),
    "models": ("models list", "models path", "models prune", "models pull"),
    "plan": ("plan",),
    "pools": ("pools export", "pools import", "pools show"),
    "profile": ("profile",),
    "serve": ("serve",),
    "simulate": ("simulate",),
    "train": ("train",),
    "tune": ("tune",),
    "tune-kernels": ("tune-kernels",),
    "verify": ("verify",),
}


def command(app: App, words: str) -> App:
    for word in words.split():
        app = app[word]
    return app


def flags(words: str) -> set[str]:
    arguments = command(build_app(), words).assemble_argument_collection()
    return {name for argument in arguments for name in argument.names if name.startswith("-")}


def engine_flags() -> set[str]:
    section = (DOCS / "generate.md").read_text().partition("## Engine options")[2]
    return documented(section)


def documented(text: str) -> set[str]:
    """The flags in the first column of the tables of a page."""
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("|")]
    return {flag for row in rows for flag in re.findall(r"`(-[\w.-]*)", row)}


def test_commands_are_these() -> None:
    app = build_app()
    names = {name for name in app if not name.startswith("-")}
    assert names == set(PAGES)


@pytest.mark.parametrize("page", PAGES)
def test_page_documents_exactly_the_flags_of_its_commands(page: str) -> None:
    text = (DOCS / f"{page}.md").read_text()
    described = documented(text)
    if "engine options](generate.md" in text:
        described |= engine_flags()
    if "sampling options](generate.md" in text:
        described |= documented((DOCS / "generate.md").read_text().partition("## Sampling options")[2])
    serve, _, rest = (DOCS / "serve.md").read_text().partition("## Replicas")
    replicas = rest.partition("## Prefill process")[0]
    if "server options](serve.md" in text:
        described |= documented(serve) - {"--config"}
    if "replica options](serve.md" in text:
        described |= documented(replicas)
    assert described - EVERYWHERE == set().union(*(flags(words) for words in PAGES[page]))


def test_every_command_has_help_with_examples(capsys: pytest.CaptureFixture[str]) -> None:
    for page in PAGES:
        assert main([page, "--help"]) == 0
        assert f"forerun {page}" in capsys.readouterr().out.partition("Examples:")[2]


def test_help_breaks_lines_where_the_screen_ends(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = ConsoleDimensions(1000, 25)  # so that nothing but the source breaks a line
    monkeypatch.setattr(Console, "size", property(lambda _console: wide))
    for page in PAGES:
        assert main([page, "--help"]) == 0
        shown = capsys.readouterr().out
        assert not re.search(r"^│ {8,}\S", shown, re.MULTILINE)
        assert "[default: ()]" not in shown
        about, _, _ = shown.partition("╭")
        assert "\n\n" in about
        assert not re.search(r"\S\n\S", about.partition("\n\n")[2])


def test_examples_of_help_fit_a_terminal_of_80_columns() -> None:
    app = build_app()
    shown = {command(app, words).help_epilogue or "" for page in PAGES for words in (page, *PAGES[page])}
    assert [line for text in shown for line in text.splitlines() if len(line) > 80] == []


def test_a_long_example_goes_on_before_an_option() -> None:
    long = f"  forerun generate m p {'--speculative-config.method suffix ' * 2}-- '--chat'"
    assert "".join(examples(long).replace("\\\n      ", "").split("Examples:\n")) == long
    assert examples(long).count("\\\n") == 1


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == forerun.__version__


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["genrate"], 'Unknown command "genrate". Did you mean "generate"?'),
        (["generate", "m", "p", "--max-tokns", "5"], "Unknown option: --max-tokns. Did you mean --max-tokens?"),
        (["generate", "m", "--", "- a", "--top-k", "1"], "--top-k: options go before --; what follows is text"),
        (["generate", "m", "--", "- a", "--top-k=1"], "--top-k: options go before --; what follows is text"),
        (["generate", "m", "p", "--max-tokns", "5", "--", "q"], "Did you mean --max-tokens?"),
        (["generate", "m", "p", "--top-k", "many"], 'unable to convert "many" into int'),
        (["generate", "m", "p", "--top-k", "2.5"], "--top-k: got 2.5; must be a whole number"),
        (["generate", "m", "p", "--max-tokens", "1.0e400"], "--max-tokens: got 1.0e400; must be a whole number"),
        (["generate", "m", "p", "--temperature", "-1"], "temperature: got -1.0; must be from 0 (greedy) to 1e6"),
        (["generate", "m"], "PROMPT is missing"),
        (
            ["generate", "m", "hello", "big", "world"],
            "got big world beyond what the command takes; leave it out, or put a text of several words in quotes",
        ),
        (["generate", "m", "p", "-"], "PROMPT and - are both given"),
        (["generate"], "MODEL"),
        (["models", "path", "smollm"], "did you mean 'smollm2-135m'?"),
        (["chat"], "MODEL"),
    ],
)
def test_mistake_is_one_line_on_stderr_and_exit_code_2(
    argv: list[str], expected: str, loader: FakeLoader, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("error: ")
    assert output.err.count("\n") == 1
    assert expected in output.err


def test_error_of_the_library_is_one_line_without_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(model: str, options: object) -> None:
        raise ModelError("weights: two\nlines")

    monkeypatch.setattr(loading, "load_llm", fail)
    assert main(["generate", "m", "p"]) == 2
    assert capsys.readouterr().err == "error: weights: two lines\n"


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "error: No space left on device\n"),
        (PermissionError(errno.EACCES, "Permission denied", "x.json"), "error: x.json: Permission denied\n"),
    ],
)
def test_what_the_system_refuses_is_one_line_with_the_file(
    error: OSError, shown: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(model: str, options: object) -> None:
        raise error

    monkeypatch.setattr(loading, "load_llm", fail)
    assert main(["generate", "m", "p"]) == 2
    assert capsys.readouterr().err == shown


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs Linux")
@pytest.mark.parametrize(
    "arguments",
    [
        "profile m --output-dir /proc/x",
        "plan m --sla ttft=1s --load rate=1,isl=1,osl=1 --output /proc/x",
        "emit --plan m --to forerun --output /proc/x",
        "simulate m --load rate=1,isl=1,osl=1 --save-result /proc/x.json",
        "bench latency m --output-json /proc/x.json",
        "bench replay /proc/x.jsonl --model m --configs {configs}",
        "bench serve --model m --save-result --result-dir /proc/x",
        "pools export m /proc/x.pools --pools-folder p",
        "serve m --request-log /proc/x.jsonl",
    ],
)
def test_output_that_cannot_be_written_is_refused_before_anything_is_read_or_measured(
    arguments: str, tmp_path: Path, loader: FakeLoader, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "configs.yaml").write_text("a: {method: ngram, num_speculative_tokens: 2}")
    assert main(arguments.format(configs=tmp_path / "configs.yaml").split()) == 2
    assert re.fullmatch(r"error: \S+: cannot write (to )?/proc/x\S* \(.+\); give a .+\n", capsys.readouterr().err)


def test_ctrl_c_ends_with_130(loader: FakeLoader) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    loader.llm.before_step = interrupt
    assert main(["generate", "m", "p"]) == 130


def test_deprecation_is_one_line_on_stderr(
    monkeypatch: pytest.MonkeyPatch, loader: FakeLoader, capsys: pytest.CaptureFixture[str]
) -> None:
    def warn(model: str, options: object) -> object:
        import warnings

        warnings.warn("write speculative_config={...}", FutureWarning, stacklevel=1)
        return loader.llm

    monkeypatch.setattr(loading, "load_llm", warn)
    main(["generate", "m", "p"])
    assert capsys.readouterr().err == "warning: write speculative_config={...}\n"


def test_reader_that_leaves_early_gets_no_traceback() -> None:
    code = "import sys; from forerun.cli.app import main; sys.exit(main(['generate', '--help']))"
    program = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert program.stdout is not None
    assert program.stderr is not None
    program.stdout.close()
    errors = program.stderr.read()
    program.stderr.close()
    assert program.wait(timeout=60) == 1
    assert errors == b""


def test_help_does_not_wait_for_torch() -> None:
    code = (
        "import sys; from forerun.cli.app import main; main(['generate', '--help']); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'huggingface_hub')))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=False).returncode == 0


def test_command_does_not_wait_for_the_others() -> None:
    code = (
        "import sys; from forerun.cli.app import main; main(['generate', '--help']); "
        "print(*[name for name in sys.modules if name in ('forerun.cli.bench', 'forerun.cli.serve', 'yaml')], file=sys.stderr)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stderr.split() == []
