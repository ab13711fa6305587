"""What is not imported: it would cost every start seconds, and every process memory."""

import multiprocessing
import os
import subprocess
import sys

import pytest

from tests.tiny_gguf import save_tiny_gguf
from tests.tiny_models import save_tiny_model
from tests.tiny_tokenizer import MIN_VOCAB_SIZE, save_tiny_tokenizer

DEAR = ("torch", "transformers", "sympy", "scipy", "PIL", "torch._dynamo", "fastapi", "matplotlib")
GENERATE = """
from forerun import LLM, SamplingParams
llm = LLM({folder!r}, speculative_config={{"method": "ngram", "num_speculative_tokens": 2}})
llm.generate("he", SamplingParams(max_tokens=4), use_tqdm=False)
llm.chat([{{"role": "user", "content": "he"}}], SamplingParams(max_tokens=4), use_tqdm=False)
"""


def imported(code):
    """Which of the dear packages a process that runs this has imported at its end."""
    code += f"\nimport sys\nprint(*[name for name in {DEAR} if name in sys.modules])"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    return ended.stdout.split()


def test_generating_and_chatting_need_no_transformers(tmp_path):
    save_tiny_model(tmp_path, vocab_size=MIN_VOCAB_SIZE)
    save_tiny_tokenizer(tmp_path, vocab_size=MIN_VOCAB_SIZE)
    assert imported(GENERATE.format(folder=str(tmp_path))) == ["torch"]


def test_a_tokenizer_alone_needs_neither_transformers_nor_torch(tmp_path):
    save_tiny_tokenizer(tmp_path)
    code = "from pathlib import Path; from forerun.models.tokenizer import load_tokenizer\n"
    code += f"load_tokenizer(Path({str(tmp_path)!r})).encode('he')"
    assert imported(code) == []


def test_saying_what_a_gguf_file_holds_needs_neither(tmp_path):
    save_tiny_gguf(tmp_path / "tiny.gguf")
    code = "from pathlib import Path; from forerun.models.weights_summary import describe_weights\n"
    code += f"assert 'tensors F32' in describe_weights(Path({str(tmp_path)!r}))"
    assert imported(code) == []


POSIX_ONLY = ("fcntl", "grp", "posix", "pty", "pwd", "resource", "syslog", "termios", "tty")
IMPORT_ALL = f"""
import builtins, importlib, pkgutil, sys
import_name = builtins.__import__

def without_posix(name, globals=None, *others, **named):
    importer = (globals or {{}}).get("__name__") or ""
    if name in {POSIX_ONLY} and importer.startswith("forerun"):
        raise ModuleNotFoundError(f"{{importer}} imports {{name}}, which Windows does not have")
    return import_name(name, globals, *others, **named)

builtins.__import__ = without_posix
import forerun
for module in pkgutil.walk_packages(forerun.__path__, "forerun."):
    if ".libforerun" in module.name:  # the kernels: a library, but no module
        continue
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        if error.name is None:  # raised above; else a package of an extra is not installed
            sys.exit(str(error))
"""


def test_every_module_can_be_imported_where_posix_modules_are_absent(capfd):
    """In a forked process, which has what others have written already, and imports of forerun everything anew."""

    def import_all():
        for name in [name for name in sys.modules if name.partition(".")[0] == "forerun"]:
            del sys.modules[name]
        exec(IMPORT_ALL, {})

    child = multiprocessing.get_context("fork").Process(target=import_all)
    child.start()
    child.join(timeout=240)
    assert child.exitcode == 0, capfd.readouterr().err


LACKING = (
    *(
        "accelerate",
        "aiohttp",
        "cyclopts",
        "fastapi",
        "gguf",
        "llguidance",
        "matplotlib",
        "openai",
        "prometheus_client",
    ),
    *("psutil", "pydantic", "schemathesis", "scipy", "starlette", "sybil", "uvicorn", "pytest_asyncio"),
)
"""What a machine with a GPU may lack, which has torch, triton, transformers and pytest."""

WITH_A_GPU = f"""
import importlib, pkgutil, sys
sys.modules |= dict.fromkeys({LACKING!r})
import torch
torch.cuda.is_available = lambda: True  # else these modules are left at once
import tests.gpu
for found in pkgutil.iter_modules(tests.gpu.__path__, "tests.gpu."):
    importlib.import_module(found.name)
import benchmarks.gpu_first_hour, benchmarks.gpu_steps, forerun.proof.run
import tests.heads_dflash, tests.heads_medusa, tests.tiny_tokenizer
"""


def test_what_runs_on_a_machine_with_a_gpu_needs_little_beside_torch():
    """`make test-gpu`'s tests and the benchmarks, where nothing can be installed."""
    pytest.importorskip("triton", reason="needs triton: pip install 'forerun[cuda]'")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ended = subprocess.run(
        [sys.executable, "-c", WITH_A_GPU], capture_output=True, text=True, timeout=120, env=environment
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
