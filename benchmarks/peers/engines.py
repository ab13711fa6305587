"""The engines compared (forerun and its peers), and the settings that each speculates with."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

BOUND = {"OMP_NUM_THREADS": "{threads}", "OMP_PROC_BIND": "true", "OMP_PLACES": "cores"}
"""Binds each OpenMP thread to a core of its own; unbound threads sometimes share one."""


WITHOUT_AMX = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16" if platform.machine() in {"x86_64", "AMD64"} else ""
"""Compiler flags for llama.cpp: built by GCC for a processor with AMX, it uses its registers in threads that have not set them up,
and dies of an illegal instruction at the first batch of several rows (llama-cpp-python 0.3.36, GCC 12)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """An engine, whose worker is workers/NAME.py and whose packages are in requirements/NAME.txt.

    `weights` says what it loads: the model's "folder", or a GGUF file of it in "bf16" or "f16". In
    `environment`, {threads}, {cores} and {venv} are replaced by the run's values.
    """

    name: str
    title: str
    weights: str = "folder"
    environment: Mapping[str, str] = field(default_factory=dict)
    build_environment: Mapping[str, str] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Contender:
    """A peer with one configuration, which runs in a process of its own.

    `speculation` has the peer's own keywords; None is plain decoding.
    """

    name: str
    peer: str
    speculation: Mapping[str, Any] | None = None


FORERUN = Peer(name="forerun", title="forerun", environment={"OMP_NUM_THREADS": "{threads}"}, note="KV on demand")

PEERS = {
    peer.name: peer
    for peer in (
        FORERUN,
        Peer(name="transformers", title="HF transformers", environment=BOUND, note="eager, KV on demand"),
        Peer(
            name="vllm",
            title="vLLM CPU",
            # One process saves communication; Intel's OpenMP is faster at 8 sequences.
            environment={
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "VLLM_CPU_OMP_THREADS_BIND": "{cores}",
                "LD_PRELOAD": "{venv}/lib/libiomp5.so",
            },
            note="compiled, 1 GiB of KV set aside",
        ),
        Peer(
            name="llama_cpp",
            title="llama.cpp",
            weights="bf16",
            environment=BOUND,
            build_environment={"CMAKE_ARGS": "-DGGML_NATIVE=ON", "CFLAGS": WITHOUT_AMX, "CXXFLAGS": WITHOUT_AMX},
            note="bf16 GGUF, KV for 2048 tokens a sequence",
        ),
        Peer(name="openvino", title="OpenVINO GenAI", weights="f16", note="f16 GGUF, KV on demand"),
    )
}

OTHERS = {name: peer for name, peer in PEERS.items() if peer != FORERUN}

CONTENDERS = (
    Contender(name="forerun", peer="forerun"),
    Contender(name="forerun auto", peer="forerun", speculation={"method": "auto"}),
    Contender(
        name="forerun n-gram",
        peer="forerun",
        speculation={
            "method": "ngram",
            "num_speculative_tokens": 16,
            "prompt_lookup_min": 1,
            "prompt_lookup_max": 5,
        },
    ),
    # No pool of past answers, since later rounds generate the same texts again.
    Contender(
        name="forerun suffix",
        peer="forerun",
        speculation={"method": "suffix", "suffix_decoding_max_cached_requests": 0},
    ),
    Contender(name="transformers", peer="transformers"),
    Contender(name="transformers prompt lookup", peer="transformers", speculation={"prompt_lookup_num_tokens": 10}),
    Contender(name="vllm", peer="vllm"),
    Contender(
        name="vllm n-gram",
        peer="vllm",
        speculation={
            "method": "ngram",
            "num_speculative_tokens": 5,
            "prompt_lookup_min": 2,
            "prompt_lookup_max": 4,
        },
    ),
    Contender(name="llama.cpp", peer="llama_cpp"),
    Contender(name="llama.cpp prompt lookup", peer="llama_cpp", speculation={"num_pred_tokens": 10}),
    Contender(name="openvino", peer="openvino"),
    Contender(
        name="openvino prompt lookup",
        peer="openvino",
        speculation={"num_assistant_tokens": 5, "max_ngram_size": 3},
    ),
)


def contenders_of(peers: list[str]) -> list[Contender]:
    """The contenders of forerun and of the chosen peers, in the order of `CONTENDERS`."""
    return [contender for contender in CONTENDERS if contender.peer in {FORERUN.name, *peers}]


def plain_contender(peer: str) -> Contender:
    """The peer's contender with plain decoding, the baseline of its speculation."""
    return next(one for one in CONTENDERS if one.peer == peer and one.speculation is None)
