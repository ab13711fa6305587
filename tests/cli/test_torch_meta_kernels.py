"""Commands import torch without its kernels of tensors without memory, and whoever needs them finds them."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from tests.native import needs_kernels
from tests.tiny_models import save_tiny_model
from tests.tiny_tokenizer import save_tiny_tokenizer

IMPORT = """
import sys
from forerun.cli.torch_meta_kernels import META_KERNELS, leave_out_meta_kernels
leave_out_meta_kernels()
import torch
def are_there():
    found = sys.modules[META_KERNELS]
    return torch._meta_registrations is found and hasattr(found, "meta_randperm") and "torch._decomp" in sys.modules
assert not are_there()
"""

PROGRAM = """
import os, sys
end = os._exit
def report(code):
    kernels = sys.modules["torch._meta_registrations"]
    print(hasattr(kernels, "meta_randperm"), "torch._decomp" in sys.modules, flush=True)
    end(code)
os._exit = report
from forerun.cli.program import program
program()
"""


def run(*arguments: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", *arguments], capture_output=True, text=True, env=os.environ | environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "needing",
    [
        pytest.param("torch.compile(torch.exp, backend='eager')(torch.ones(3))", marks=pytest.mark.slow),
        "import torch._decomp",
        "import torch._refs.linalg",
        pytest.param("import transformers.modeling_utils", marks=pytest.mark.slow),
    ],
)
def test_whoever_needs_them_finds_them(needing):
    assert run(f"{IMPORT}\n{needing}\nprint(are_there())") == "True\n"


def test_a_module_that_they_import_runs_once_and_has_its_own_spec():
    found = run(f"{IMPORT}\nimport torch._refs\nprint(torch._refs.__spec__.origin, torch._refs.__spec__._initializing)")
    assert found.split() == [*run("import torch; print(torch._refs.__spec__.origin)").split(), "False"]


def test_who_only_looks_for_a_module_finds_where_it_is():
    found = run(
        f"{IMPORT}\nfrom importlib.util import find_spec\nprint(find_spec('torch._refs').origin)\nimport torch._refs"
    )
    assert found == run("import torch; print(torch._refs.__spec__.origin)")


def test_an_import_of_theirs_that_fails_is_said_by_each_later_one():
    interrupt = "import torch.library\ndef fail(*_, **__): raise KeyboardInterrupt\ntorch.library.Library.impl = fail\n"
    twice = "for _ in range(2):\n    try: import torch._dynamo\n    except BaseException as error: print(type(error).__name__)"
    assert run(f"{IMPORT}\n{interrupt}\n{twice}").split() == ["KeyboardInterrupt", "ImportError"]


def test_nothing_is_left_out_beside_a_plug_in_for_a_device(tmp_path):
    described = tmp_path / "a_device-1.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: a-device\nVersion: 1\n")
    (described / "entry_points.txt").write_text("[torch.backends]\na_device = a_device:load\n")
    (tmp_path / "a_device.py").write_text("def load():\n    from torch._meta_registrations import meta_randperm\n")
    assert run(f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{IMPORT.replace('assert not', 'assert')}") == ""


def test_nothing_is_taken_from_a_torch_that_is_imported():
    assert run(f"import torch\n{IMPORT.replace('assert not', 'assert')}") == ""


def test_random_numbers_are_drawn_without_them():
    assert run(
        f"{IMPORT}\nprint(torch.rand(1, generator=torch.Generator().manual_seed(0)).shape)\nassert not are_there()"
    )


GENERATE = ("generate", "MODEL", "1 2 3", "--max-tokens", "9")


def slow(*command: str) -> Any:
    return pytest.param(command, marks=pytest.mark.slow)


@needs_kernels
@pytest.mark.parametrize(
    "command",
    [
        (*GENERATE, "--quantization", "int4"),
        slow(*GENERATE),
        slow(
            *GENERATE, "--speculative-config", '{"method": "self", "quantization": "int4", "num_speculative_tokens": 3}'
        ),
        slow("verify", "MODEL", "--num-samples", "50", "--max-tokens", "4"),
    ],
)
def test_a_command_goes_without_them(tmp_path, command):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    folder = save_tiny_model(tmp_path / "model", vocab_size=264, max_position_embeddings=1024, **sizes)
    save_tiny_tokenizer(folder)
    words = [str(folder) if word == "MODEL" else word for word in command]
    assert run(PROGRAM, *words, FORERUN_CACHE=str(tmp_path)).endswith("False False\n")
