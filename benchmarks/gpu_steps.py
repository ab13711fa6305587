"""What a step takes on a GPU: forerun's kernels against its own graphs with cuBLAS, torch kernel by kernel, and transformers.

Run: python -m benchmarks.gpu_steps [--json FILE] [--only QUESTION ...] [--shape llama-3.1-8b] [--small-model FOLDER]
Needs one NVIDIA GPU, torch with CUDA, triton and transformers; no network, and no weights: those of the shapes are random, but
for those of SmolLM2-135M where their folder is given.
Questions, each answered by itself, so that a failure of one leaves the others:

- sampling: microseconds of editing and drawing 64 rows of 128,256 logits with every rule.
- small: milliseconds of a step of SmolLM2-135M's shape.
- steps: of plain decoding with 1 and 64 sequences, all opponents in turns, forerun's over the same weights.
- rows: of a step with 1, 8, 16 and 64 rows of one sequence after 2048 tokens: its last token and a draft.
- idle: microseconds a step in which the GPU has nothing to do, with a drafter on the device and with one on the host.
- capture: seconds and memory of recording all graphs.

Texts are compared by `make soak-gpu`. On a CPU (`--device cpu --shape tiny`) the formulas compute: to see that it runs.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from forerun import LLM, Draft, SamplingParams
from forerun.bench.machine import describe_machine
from forerun.build import load_target
from forerun.config.settings import EngineSettings
from forerun.config.speculative_config import resolve_speculative
from forerun.core.sequence import Sequence
from forerun.core.stats import StepTimes
from forerun.drafters.base import DraftContext, TargetInfo
from forerun.executor.device_computation import DeviceFunctions
from forerun.executor.device_slots import MOST_BIASES, MOST_STOP_IDS
from forerun.executor.host_copies import free_bytes
from forerun.models.base import LoadedTarget
from forerun.ops.cuda.table import (
    HAS_ALLOWED,
    HAS_BIAS,
    HAS_MIN_LENGTH,
    HAS_PENALTIES,
    DeviceTable,
    RuleTable,
    StepRows,
)

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16"}
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
    },
    "smollm2-135m": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "max_position_embeddings": 8192,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    },
}
SMALL = "smollm2-135m"
OURS = "kernels in graphs"
ENGINES: dict[str, dict[str, Any]] = {
    OURS: {"device_step": True},
    "cuBLAS in graphs": {"device_step": True, "device_matmul": "torch"},
    "torch, kernel by kernel": {"device_step": False},
}
TRANSFORMERS = "transformers, kernel by kernel"

Measure = Callable[[int], float]
"""Seconds that so many steps take."""


class SteadyDrafter:
    """Drafts as many tokens as it may, from the host and all by chance, so that steps have rows to verify."""

    needs: frozenset[str] = frozenset()

    def __init__(self, target: TargetInfo) -> None:
        self._vocab_size = target.vocab_size
        self._number = 0

    def start(self, sequence: Sequence) -> None:
        """See `Drafter`."""

    def propose(self, context: DraftContext) -> list[Draft]:
        """See `Drafter`."""
        self._number += 1
        return [
            Draft(tuple((self._number + 7 * i) % self._vocab_size for i in range(request.max_tokens)))
            for request in context.requests
        ]

    def stop(self, sequence: Sequence) -> None:
        """See `Drafter`."""


@dataclass(slots=True)
class Bench:
    """What all questions share: the device, the weights of each shape, and how much is measured."""

    device: str
    folder: Path
    shape: str
    num_steps: int
    rounds: int
    long_context: int
    small_model: Path | None = None  # has the weights of the small shape
    _targets: dict[str, LoadedTarget] = field(default_factory=dict)

    def path(self, shape: str) -> Path:
        """A folder with the configuration of a shape, and no weights unless they were given."""
        if shape == SMALL and self.small_model is not None:
            return self.small_model
        folder = self.folder / shape
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(LLAMA | SHAPES[shape]))
        return folder

    def engine(
        self,
        shape: str,
        *,
        num_sequences: int,
        context: int,
        config: Any = None,
        tokens_per_step: int = 1,
        **settings: Any,
    ) -> LLM:
        """An engine over the shape's weights, with KV for so many sequences, that write so many tokens in a step at most."""
        say(f"an engine for {shape}, {num_sequences} sequences, {config}, {settings}")
        longest = context + tokens_per_step * (self.num_steps * (2 * self.rounds + 2) + 16)
        full = EngineSettings(
            model=str(self.path(shape)),
            device=self.device,
            load_format="auto" if self.path(shape) == self.small_model else "dummy",
            dtype="auto" if self.device != "cpu" else "float16",  # which the CPU's own kernels leave to torch
            max_model_len=longest,
            max_num_seqs=num_sequences,
            num_gpu_blocks_override=num_sequences * (-(-longest // 16) + 2),
            enable_prefix_caching=False,
            speculative_config=config,
            **settings,
        )
        if shape not in self._targets:
            self._targets.clear()  # one model's weights at a time
            self._targets[shape] = load_target(Path(full.model), full, full.torch_device)
        return LLM.from_target(self._targets[shape], full, resolve_speculative(config))

    def in_turns(self, opponents: Mapping[str, Measure]) -> dict[str, float]:
        """Median milliseconds of a step of each, all in turns."""
        for measure in opponents.values():
            measure(self.num_steps)
        taken: dict[str, list[float]] = {name: [] for name in opponents}
        for turn in range(self.rounds):
            for name in list(opponents)[:: 1 if turn % 2 == 0 else -1]:
                taken[name].append(1e3 * opponents[name](self.num_steps) / self.num_steps)
        return {name: statistics.median(times) for name, times in taken.items()}

    def wait(self) -> None:
        """Until the device has nothing to do."""
        if torch.device(self.device).type == "cuda":
            torch.cuda.synchronize()

    def empty(self) -> None:
        """Give back the memory of engines that are gone; some hold themselves, and their graphs."""
        gc.collect()
        if torch.device(self.device).type == "cuda":
            torch.cuda.empty_cache()


def decoding(bench: Bench, llm: LLM, *, num_sequences: int, context: int) -> Measure:
    """Steps of sequences that never end."""
    sampling = SamplingParams(temperature=0.0, max_tokens=llm.max_model_len - context - 1, ignore_eos=True)
    vocab_size = llm.executor.model.vocab_size
    for i in range(num_sequences):
        prompt = [(7 * i + 13 * place) % (vocab_size - 5) + 5 for place in range(context)]
        llm.engine.add_request(f"{i}", prompt, sampling)
    for _ in range(-(-num_sequences * context // llm.settings.max_num_batched_tokens) + 8):
        llm.engine.step()
    assert llm.engine.state.num_running == num_sequences, "all prompts are read"

    def measure(count: int) -> float:
        bench.wait()
        started = time.perf_counter()
        for _ in range(count):
            llm.engine.step()
        bench.wait()
        return time.perf_counter() - started

    return measure


def by_transformers(bench: Bench, shape: str, *, num_sequences: int, context: int) -> Measure:
    """Steps of transformers' own model and cache, of random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(bench.path(shape))
    with torch.device(bench.device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()  # type: ignore[no-untyped-call]
    prompts = torch.arange(num_sequences * context, device=bench.device).view(num_sequences, context) * 13
    with torch.inference_mode():
        output = model(prompts % config.vocab_size, use_cache=True, logits_to_keep=1)
    tokens, cache = output.logits[:, -1:].argmax(-1), output.past_key_values

    def measure(count: int) -> float:
        nonlocal tokens
        bench.wait()
        started = time.perf_counter()
        with torch.inference_mode():
            for _ in range(count):
                tokens = model(tokens, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
                tokens.tolist()  # as who writes a text must
        return time.perf_counter() - started

    return measure


def steps(bench: Bench) -> dict[str, Any]:
    """Milliseconds of a step with 1 and with 64 sequences, and the ratios of the opponents to the kernels."""
    found: dict[str, Any] = {}
    for num_sequences in (1, 64):
        opponents = {
            name: decoding(
                bench,
                bench.engine(bench.shape, num_sequences=num_sequences, context=128, **settings),
                num_sequences=num_sequences,
                context=128,
            )
            for name, settings in ENGINES.items()
        }
        opponents[TRANSFORMERS] = by_transformers(bench, bench.shape, num_sequences=num_sequences, context=128)
        times = bench.in_turns(opponents)
        found[f"{num_sequences} sequences"] = {
            "ms": times,
            "times as long as the kernels": {name: taken / times[OURS] for name, taken in times.items()},
        }
        del opponents
        bench.empty()
    return found


def rows(bench: Bench) -> dict[str, Any]:
    """Milliseconds of a step of one sequence with 1, 8, 16 and 64 rows, by the device's own clock."""
    opponents, names = {}, (OURS, "cuBLAS in graphs")
    for num_rows in (1, 8, 16, 64):
        config = {"method": SteadyDrafter, "num_speculative_tokens": num_rows - 1} if num_rows > 1 else None
        for name in names:
            llm = bench.engine(
                bench.shape,
                num_sequences=1,
                context=bench.long_context,
                config=config,
                tokens_per_step=2,  # drafts by chance hardly ever stand
                cudagraph_capture_sizes=[num_rows],
                **ENGINES[name],
            )
            decoding(bench, llm, num_sequences=1, context=bench.long_context)
            opponents[f"{name}, {num_rows} rows"] = on_device(llm)
    times = bench.in_turns(opponents)
    of_one = {name: taken / times[f"{name.split(',')[0]}, 1 rows"] for name, taken in times.items()}
    return {"ms": times, "of one row": of_one}


def say(what: str) -> None:
    """Name what is done next, for whoever wonders what takes so long: minutes may be all there are."""
    print(f"gpu_steps: {what}", file=sys.stderr, flush=True)


def on_device(llm: LLM) -> Measure:
    """Seconds of an engine's steps by the device's clock."""
    return lambda count: _times_of(llm, count).forward


def _times_of(llm: LLM, count: int) -> StepTimes:
    before = replace(llm.stats.times)
    for _ in range(count):
        llm.engine.step()
    return llm.stats.times.since(before)


def idle(bench: Bench) -> dict[str, Any]:
    """Microseconds a step in which the device waits, and those that the host's drafter takes."""
    found: dict[str, Any] = {}
    drafters: dict[str, Any] = {
        "none": None,
        "ngram, on the device": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1},
        "first layers, on the device": {"method": "self", "exit_layer": 1, "num_speculative_tokens": 3},
        "suffix, on the host": {"method": "suffix", "num_speculative_tokens": 3},
        "as many as may be, on the host": {"method": SteadyDrafter, "num_speculative_tokens": 3},
    }
    for name, config in drafters.items():
        llm = bench.engine(bench.shape, num_sequences=1, context=128, config=config, tokens_per_step=4, **ENGINES[OURS])
        decoding(bench, llm, num_sequences=1, context=128)(bench.num_steps)
        times = _times_of(llm, bench.num_steps * bench.rounds)
        found[name] = {
            "idle": 1e6 * times.idle / times.num_steps,
            "drafting": 1e6 * times.draft / times.num_steps,
            "steps by graphs": times.num_replayed_steps / times.num_steps,
        }
    return found


def small(bench: Bench) -> dict[str, Any]:
    """Milliseconds of a step of a small model."""
    shape = "tiny" if bench.shape == "tiny" and bench.small_model is None else SMALL
    opponents = {
        name: decoding(
            bench, bench.engine(shape, num_sequences=1, context=128, **settings), num_sequences=1, context=128
        )
        for name, settings in ENGINES.items()
    }
    return bench.in_turns(opponents)


def sampling(bench: Bench) -> dict[str, Any]:
    """Microseconds of what a step does between logits and tokens, with every rule on every row."""
    num_rows, vocab_size = 64, 128256 if bench.shape != "tiny" else 512
    device = torch.device(bench.device)
    rules = RuleTable.empty(num_rows, vocab_size, device=device, most_stop_ids=MOST_STOP_IDS, most_biases=MOST_BIASES)
    table = DeviceTable.empty(num_rows, max_length=64, num_blocks=4, most_drafted=1, device=device)
    rows = StepRows.empty(num_rows, num_rows, longest_path=1, device=device)
    rows.slots.copy_(torch.arange(num_rows))
    rows.positions.fill_(31)
    table.lengths.fill_(32)
    rules.flags.fill_(HAS_PENALTIES | HAS_BIAS | HAS_ALLOWED | HAS_MIN_LENGTH)
    rules.temperature.fill_(0.8)
    rules.floor.fill_(-6.0)
    rules.top_k.fill_(200)
    rules.top_p.fill_(0.95)
    rules.repetition.fill_(1.1)
    rules.frequency.fill_(0.1)
    rules.presence.fill_(0.2)
    rules.counts[:, :100] = 1
    rules.in_prompt.fill_(0x55555555)
    rules.allowed.fill_(-1)
    rules.min_length.fill_(64)
    rules.stop_ids[:, 0] = 2
    rules.bias_ids[:, 0] = 7
    rules.bias_values[:, 0] = 1.0
    masks, has_mask = torch.full_like(rules.allowed, -1), torch.ones(num_rows, dtype=torch.int32, device=device)
    compute = DeviceFunctions.choose(device)
    source = 3 * torch.randn(num_rows, vocab_size, generator=torch.Generator(device).manual_seed(0), device=device)
    logits = torch.empty_like(source)
    token_ids = torch.full((num_rows,), -1, dtype=torch.int32, device=device)
    largest = torch.zeros(num_rows, device=device)

    def copy() -> None:
        logits.copy_(source)

    def draw() -> None:
        copy()
        compute.edit(logits, rows, table, rules, row_masks=masks, has_row_mask=has_mask)
        compute.sample(logits, rows, rules, token_ids, largest)

    whole, copied = (microseconds(work, device, repeats=10 * bench.rounds) for work in (draw, copy))
    return {"microseconds": whole - copied, "of a copy of the logits beside it": copied}


def microseconds(work: Callable[[], object], device: torch.device, *, repeats: int) -> float:
    """Median time of `work`, in a CUDA graph on a GPU."""
    if device.type != "cuda":
        started = time.perf_counter()
        work()
        return 1e6 * (time.perf_counter() - started)
    from benchmarks.gpu_first_hour import microseconds as in_a_graph

    return in_a_graph(work, repeats=repeats)


def capture(bench: Bench) -> dict[str, Any]:
    """Seconds and GiB of recording the graphs of all sizes, at first and where kernels are compiled."""
    from forerun.executor.device import DeviceExecutor
    from forerun.executor.step_graphs import CudaRecorder

    device = torch.device(bench.device)
    if device.type != "cuda":
        return {"left out": "there are no CUDA graphs on a CPU"}
    found: dict[str, Any] = {}
    for attempt in ("first", "kernels compiled"):
        llm = bench.engine(bench.shape, num_sequences=64, context=128, enforce_eager=True, **ENGINES[OURS])
        assert isinstance(llm.executor, DeviceExecutor), "the step is on the device"
        bench.empty()
        free, started = free_bytes(device), time.perf_counter()
        llm.executor.use_graphs(llm.settings.graph_sizes, CudaRecorder(device))
        found[attempt] = {
            "seconds": time.perf_counter() - started,
            "GiB": (free - free_bytes(device)) / 2**30,
            "graphs": len(llm.settings.graph_sizes),
        }
    return found


QUESTIONS: dict[str, Callable[[Bench], dict[str, Any]]] = {
    function.__name__: function
    for function in (sampling, small, steps, rows, idle, capture)  # the quick ones first
}


def main() -> int:
    """Answer each question and write what is known after each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the results here, after each question")
    parser.add_argument("--only", nargs="+", choices=QUESTIONS, default=list(QUESTIONS))
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=50, help="of each turn")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--context", type=int, default=2048, help="tokens before the rows of the question rows")
    parser.add_argument("--small-model", type=Path, help="a folder with SmolLM2-135M's weights, for the question small")
    arguments = parser.parse_args()
    if torch.device(arguments.device).type == "cuda" and not torch.cuda.is_available():
        print("gpu_steps: found no CUDA device; run it on a machine with an NVIDIA GPU", file=sys.stderr)
        return 2
    results: dict[str, Any] = {"machine": describe_machine(torch.device(arguments.device)), "shape": arguments.shape}
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(
            device=arguments.device,
            folder=Path(folder),
            shape=arguments.shape,
            num_steps=arguments.steps,
            rounds=arguments.rounds,
            long_context=arguments.context,
            small_model=arguments.small_model,
        )
        for name in arguments.only:
            say(name)
            begun = time.monotonic()
            try:
                results[name] = QUESTIONS[name](bench)
            except Exception:  # one answer less; a GPU may be at hand for minutes only
                results[name] = {"failed": traceback.format_exc()}
            bench.empty()
            results[name]["seconds taken"] = round(time.monotonic() - begun, 1)
            print(json.dumps({name: results[name]}, indent=1), flush=True)
            if arguments.json:
                arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    return 1 if any("failed" in results[name] for name in arguments.only) else 0


if __name__ == "__main__":
    sys.exit(main())
