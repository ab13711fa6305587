"""Prompts in any number, from Python's own library: wishes to edit a function, to explain one, and questions about modules."""

from __future__ import annotations

import ast
import functools
import random
import sysconfig
import textwrap
from collections.abc import Iterator
from pathlib import Path

KINDS = ("edit", "explain", "question")


def prompts_by_kind(count: int, *, is_test: bool) -> dict[str, list[str]]:
    """So many prompts of each kind, in a fixed random order; those of the test are none of the others."""
    chosen = _shuffled_functions()[int(is_test) :: 2]
    writers = {"edit": _edit, "explain": _explain, "question": _question}
    parts = {kind: chosen[number :: len(KINDS)][:count] for number, kind in enumerate(KINDS)}
    return {kind: [writers[kind](*function) for function in part] for kind, part in parts.items()}


def mixed_prompts(count: int, *, is_test: bool) -> list[str]:
    """Prompts of all kinds in turn."""
    found = prompts_by_kind(-(-count // len(KINDS)), is_test=is_test)
    return [prompt for three in zip(*found.values(), strict=True) for prompt in three][:count]


@functools.cache
def _shuffled_functions() -> list[tuple[str, str, str]]:
    by_name = {(module, name): code for module, name, code in _functions(Path(sysconfig.get_paths()["stdlib"]))}
    functions = [(module, name, code) for (module, name), code in sorted(by_name.items())]
    random.Random(0).shuffle(functions)
    return functions


def _functions(folder: Path) -> Iterator[tuple[str, str, str]]:
    """Module, name and source of the short functions of a library's modules."""
    for file in sorted(folder.glob("*.py")):
        source = file.read_text(encoding="utf-8")
        lines = source.split("\n")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef):
                code = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
                if 300 < len(code) < 1500 and not node.name.startswith("_"):
                    yield file.stem, node.name, code


def _edit(module: str, name: str, code: str) -> str:
    return f"Rename the function {name} of {module} to new_{name}. Answer with the whole function and nothing else.\n\n```python\n{code}\n```"


def _explain(module: str, name: str, code: str) -> str:
    return f"Explain in a few sentences what the function {name} of the module {module} does.\n\n```python\n{code}\n```"


def _question(module: str, name: str, code: str) -> str:  # noqa: ARG001 - a question shows no code
    return f"When would somebody who writes Python call {module}.{name}? Give two short examples."
