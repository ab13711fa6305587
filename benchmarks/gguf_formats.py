"""Compares forerun with llama.cpp on the same GGUF files: random weights in the shape of a Llama of 1.07 billion weights, of a Mixtral
of 0.9 billion of which a token takes a fifth, or of gpt-oss-20b with a smaller vocabulary, or files.

    python -m benchmarks.gguf_formats --formats Q4_0 Q4_K_M Q8_0 --rounds 7 --folder /tmp/gguf --json FILE
    python -m benchmarks.gguf_formats --shape random-mixtral-1b --formats Q4_0 Q8_0 --rounds 7 --folder /tmp/gguf --json FILE
    python -m benchmarks.gguf_formats --shape random-gpt-oss-20b --layers 6 --formats MXFP4 --rounds 7 --folder /tmp/gguf --json FILE
    python -m benchmarks.gguf_formats --files SmolLM2-135M-Instruct.Q4_1.gguf --beside smollm2-135m --folder /tmp/gguf --json FILE
    python -m benchmarks.gguf_formats --formats Q4_0 --layers 1 --rounds 1 --folder /tmp/gguf    # does it run?

Prints, for each format or file, median milliseconds of a pass over one and over eight tokens of one sequence after 256 others,
of the first token after a prompt of 512, and of each of 64 tokens written after it. forerun is measured with the
activations that it takes by itself, bf16 or int16, and with int8, which is what llama.cpp rounds them to; `--beside` measures
it on another model too. All engines hold their model, and all but one are stopped while that one is measured, in turn, and
back in every other round. llama.cpp is the one that `python -m benchmarks.peers install llama_cpp` builds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch

from benchmarks.peers.engines import BOUND
from benchmarks.peers.gguf_files import add_shape, add_tokenizer
from benchmarks.peers.install import DEFAULT_FOLDER, python_in
from benchmarks.peers.schedule import turn
from benchmarks.peers.worker_process import WorkerProcess
from forerun.bench.machine import describe_machine
from forerun.models.store import resolve_model
from forerun.ops.block_formats import BLOCK_FORMATS

CONFIGS = Path(__file__).parent / "configs"
SHAPES = ("random-llama-1b", "random-mixtral-1b", "random-gpt-oss-20b")
EXPERTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
TOKENIZER = "smollm2-135m"  # of as many tokens
MIXES = ("Q4_K_M", "Q5_K_M", "Q3_K_M")
ROWS, CONTEXT, PROMPT, NUM_WRITTEN = (1, 8), 256, 512, 65
MEASURES = (*(f"T({rows})" for rows in ROWS), "prompt", "token")
OWN, OWN_INT8, PEER = "forerun", "forerun int8", "llama_cpp"
SIXTEEN_BIT = {  # where a block has fp16 numbers
    **dict.fromkeys(("Q8_0", "Q4_0", "Q5_0", "IQ4_NL", "IQ4_XS"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "MXFP4": (),
}


def type_of(tensor: str, kind: str, layer: int, num_layers: int) -> str:
    """The block format of a matrix in a file of a kind, as llama.cpp's quantize chooses it."""
    if kind == "MXFP4":  # as gpt-oss's files have it
        return kind if tensor.split(".")[-2] in EXPERTS else "Q8_0"
    if tensor == "token_embd.weight":
        return kind if kind == "Q8_0" else "Q6_K"
    if kind not in MIXES:
        return kind
    eighth = num_layers // 8
    keeps_more = layer < eighth or layer >= 7 * eighth or (layer - eighth) % 3 == 2
    base = kind.removesuffix("_M")
    if base != "Q3_K" and keeps_more and tensor.endswith(("attn_v.weight", "ffn_down.weight")):
        return "Q6_K"
    if base == "Q3_K" and tensor.endswith(("attn_v.weight", "ffn_down.weight", "attn_output.weight")):
        return "Q4_K"
    return base


def matrices(config: dict[str, Any]) -> Iterator[tuple[str, int, tuple[int, ...]]]:
    """(name, layer, shape) of each matrix, or of those of all experts of a layer."""
    width, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    yield "token_embd.weight", 0, (config["vocab_size"], width)
    if not config["tie_word_embeddings"]:
        yield "output.weight", 0, (config["vocab_size"], width)
    for layer in range(config["num_hidden_layers"]):
        shapes: dict[str, tuple[int, ...]] = {
            "attn_q": (queries, width),
            "attn_k": (keys, width),
            "attn_v": (keys, width),
            "attn_output": (width, queries),
        }
        mlp = {"ffn_gate": (inner, width), "ffn_up": (inner, width), "ffn_down": (width, inner)}
        if experts := config.get("num_local_experts"):
            shapes |= {f"{name}_exps": (experts, *shape) for name, shape in mlp.items()}
        else:
            shapes |= mlp
        yield from ((f"blk.{layer}.{name}.weight", layer, shape) for name, shape in shapes.items())


def random_blocks(name: str, shape: tuple[int, ...], random: np.random.Generator) -> npt.NDArray[np.uint8]:
    """Blocks of random codes with scales that keep a pass's numbers small: [..., outputs, bytes]."""
    row = BLOCK_FORMATS[name]
    blocks = random.integers(0, 256, (*shape[:-1], shape[-1] // row.weights, row.bytes), dtype=np.uint8)
    for place in SIXTEEN_BIT[name]:
        scale = random.uniform(1e-5, 2e-5, blocks.shape[:-1]).astype(np.float16)
        blocks[..., place : place + 2] = scale[..., None].view(np.uint8)
    if name == "MXFP4":
        blocks[..., 0] = 115
    return blocks.reshape(*shape[:-1], -1)


def write_random(file: Path, kind: str, config: dict[str, Any]) -> None:
    """Write a random model whose matrices are in a kind of blocks, or in a mix of kinds."""
    random = np.random.default_rng(0)
    unfinished = file.with_suffix(".unfinished")
    is_gpt_oss = config["model_type"] == "gpt_oss"
    writer = gguf.GGUFWriter(str(unfinished), "gpt-oss" if is_gpt_oss else "llama")
    add_shape(writer, config)
    add_tokenizer(writer, resolve_model(TOKENIZER), config)
    ones = np.ones(config["hidden_size"], dtype=np.float32)
    writer.add_tensor("output_norm.weight", ones)
    for layer in range(config["num_hidden_layers"]):
        for name in ("attn_norm", "post_attention_norm" if is_gpt_oss else "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", ones)
        if experts := config.get("num_local_experts"):
            router = random.normal(0.0, 0.05, (experts, config["hidden_size"])).astype(np.float32)
            writer.add_tensor(f"blk.{layer}.ffn_gate_inp.weight", router)
    if is_gpt_oss:
        add_what_is_gpt_osss(writer, config, random)
    for name, layer, shape in matrices(config):
        block = type_of(name, kind, layer, config["num_hidden_layers"])
        writer.add_tensor(name, random_blocks(block, shape, random), raw_dtype=gguf.GGMLQuantizationType[block])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    unfinished.rename(file)


def add_what_is_gpt_osss(writer: gguf.GGUFWriter, config: dict[str, Any], random: np.random.Generator) -> None:
    """Add the sizes, biases and sinks that a gpt-oss has beside its matrices."""
    rope = config["rope_parameters"]
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_expert_feed_forward_length(config["intermediate_size"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    biased = {
        name.removesuffix(".weight"): shape[:-1] for name, _, shape in matrices(config) if name.startswith("blk.")
    }
    for layer in range(config["num_hidden_layers"]):
        biased[f"blk.{layer}.ffn_gate_inp"] = (config["num_local_experts"],)
        sinks = random.normal(0.0, 1.0, config["num_attention_heads"]).astype(np.float32)
        writer.add_tensor(f"blk.{layer}.attn_sinks.weight", sinks)
    for name, shape in biased.items():
        writer.add_tensor(f"{name}.bias", random.normal(0.0, 0.01, shape).astype(np.float32))


def measure(models: dict[str, str], *, logs: Path, threads: int, rounds: int) -> dict[str, Any]:
    """Seconds of each measure and engine, round by round, and what each took to load.

    Args:
        models: a row's name -> what it loads; PEER's is loaded by llama.cpp, all others by forerun, OWN_INT8's with
            activations in int8.
        logs: a folder.
        threads: of each engine.
        rounds: how often each is measured.
    """
    bound = {name: value.format(threads=threads) for name, value in BOUND.items()}
    found: dict[str, Any] = {name: {measure: [] for measure in MEASURES} for name in models}
    prompt = [1000 + i % 40000 for i in range(0, 7 * PROMPT, 7)]
    pythons = {OWN: Path(sys.executable), PEER: python_in(PEER, DEFAULT_FOLDER)}
    with ExitStack() as stack:
        workers = {}
        for name, model in models.items():
            engine = PEER if name == PEER else OWN
            worker = WorkerProcess(
                [str(pythons[engine]), "-m", f"benchmarks.peers.workers.{engine}"],
                environment=bound if engine == PEER else {"OMP_NUM_THREADS": str(threads)},
                log=logs / f"{Path(name).name}.log",
            )
            workers[name] = stack.enter_context(closing(worker))
            settings = {"activation_dtype": "int8"} if name == OWN_INT8 else {}
            loaded = worker.ask(
                "load", model=model, max_model_len=1024, num_threads=threads, speculation=None, settings=settings
            )
            found[name] |= {
                "load_seconds": loaded["seconds"],
                "peak_bytes": loaded["peak_bytes"],
                "version": loaded["version"],
            }
        for index in range(rounds + 1):  # the first warms up
            for name, worker in turn([*workers.items()], index):
                curve = worker.ask("curve", rows=list(ROWS), context=CONTEXT, repeats=3)["seconds"]
                written = worker.ask("generate", prompts=[prompt], max_tokens=NUM_WRITTEN)
                if index:
                    for rows in ROWS:
                        found[name][f"T({rows})"].append(statistics.median(curve[str(rows)]))
                    first = written["first_token_seconds"]
                    found[name]["prompt"].append(first)
                    found[name]["token"].append((written["seconds"] - first) / (NUM_WRITTEN - 1))
    return found


def print_ratios(title: str, found: dict[str, Any]) -> None:
    """One line for each measure and each pair of engines that are compared."""
    pairs = [(own, other) for own in (OWN, OWN_INT8) for other in found if other not in (OWN, OWN_INT8)]
    for measure_name in MEASURES:
        for own, other in pairs:
            times, others = found[own][measure_name], found[other][measure_name]
            ratio = statistics.median(a / b for a, b in zip(times, others, strict=True))
            print(
                f"{title:8} {measure_name:7} {own:12} {1e3 * statistics.median(times):9.1f} ms  "
                f"{other} {1e3 * statistics.median(others):9.1f} ms  ratio {ratio:.2f}",
                flush=True,
            )
    loads = (f"{name} {of['load_seconds']:.1f} s" for name, of in found.items())
    print(f"{title:8} load    {', '.join(loads)}", flush=True)


def main() -> None:
    """Write what files are missing, measure each, and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = [*SIXTEEN_BIT, *MIXES]
    parser.add_argument("--formats", nargs="+", default=[], choices=kinds, metavar="FORMAT", help="random weights")
    parser.add_argument("--shape", default=SHAPES[0], choices=SHAPES, help="of random weights (default: %(default)s)")
    parser.add_argument("--files", nargs="+", default=[], metavar="FILE", help="models that exist")
    parser.add_argument("--beside", metavar="MODEL", help="forerun is measured on this model too")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--layers", type=int, help="of the random model, if not as many as it has")
    parser.add_argument(
        "--folder", type=Path, required=True, help="for random models of about a gigabyte each, and logs"
    )
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if not arguments.formats and not arguments.files:
        parser.error("--formats: is missing, and so are --files; give one of them")
    arguments.folder.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}
    config, name = json.loads((CONFIGS / arguments.shape / "config.json").read_text()), arguments.shape
    if arguments.layers:
        config["num_hidden_layers"], name = arguments.layers, f"{name}-{arguments.layers}-layers"
    files = {kind: arguments.folder / f"{name}-{kind}.gguf" for kind in arguments.formats}
    for kind, file in files.items():
        if not file.exists():
            write_random(file, kind, config)
    files |= {Path(file).name: Path(file) for file in arguments.files}
    for title, file in files.items():
        models = {OWN: str(file), OWN_INT8: str(file), PEER: str(file)}
        if arguments.beside:
            models[arguments.beside] = arguments.beside
        results[title] = measure(models, logs=arguments.folder, threads=arguments.threads, rounds=arguments.rounds)
        print_ratios(title, results[title])
        if arguments.json:  # after each format, of which one may take an hour
            report = {
                "machine": describe_machine(torch.device("cpu")),
                "rounds": arguments.rounds,
                "shape": arguments.shape,
                "layers": config["num_hidden_layers"],
                "formats": results,
            }
            arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
