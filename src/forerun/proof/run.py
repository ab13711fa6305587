"""Proves one model and configuration lossless, by all checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from forerun.config.settings import EngineSettings
from forerun.config.speculative_config import verifier_part
from forerun.llm import LLM
from forerun.proof.adversary import AdversarialDrafter
from forerun.proof.greedy import check_greedy
from forerun.proof.report import ProofReport
from forerun.proof.sampled import plan_experiment, run_experiment

PROMPTS = (
    "List the first ten prime numbers, then list them again in reverse order.",
    "Write a Python function that returns the n-th Fibonacci number, then the same function with a docstring.",
    "Repeat this sentence three times: the quick brown fox jumps over the lazy dog.",
    "Explain in two sentences why the sky is blue.",
    "def add(a, b):\n    return a + b\n\ndef add_three(a, b, c):\n    return",
    "Once upon a time there was a small engine that",
    "A B C A B C A B C A B",
    "Translate to French: good morning, good evening, good night.",
)

DEFAULT_CONFIG: Mapping[str, Any] = {
    "method": "ngram",
    "num_speculative_tokens": 5,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 4,
}
AUTO_CONFIG: Mapping[str, Any] = {"method": "auto"}

NUM_NARROW_TOKENS = 6
NUM_ADVERSARIAL_TOKENS = 4
KV_BYTES = 2 << 30  # of each engine on a GPU


def ignore(message: str) -> None:
    """Show no progress."""


def with_room_for_two(model: str, settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Settings under which a second engine fits on a GPU beside the first, which otherwise takes its whole share for KV.

    Settings that say how much KV there is stay as they are, and so do those for a CPU.
    """
    is_sized = any(settings.get(name) is not None for name in ("kv_cache_memory_bytes", "num_gpu_blocks_override"))
    if is_sized or EngineSettings.from_keywords(model, settings).torch_device.type != "cuda":
        return settings
    return {**settings, "kv_cache_memory_bytes": KV_BYTES}


def prove(
    model: str,
    *,
    speculative_config: Mapping[str, Any] | str | None = None,
    settings: Mapping[str, Any] | None = None,
    prompts: Sequence[str] = PROMPTS,
    max_tokens: int = 64,
    num_samples: int = 1000,
    progress: Callable[[str], None] = ignore,
) -> ProofReport:
    """Check a configuration.

    The greedy check compares each prompt's output with and without speculation. The sampled checks compare
    outputs with the target's exact distribution, first with the user's drafter and then with an adversarial
    one under the same verifier.

    Args:
        model: as for `LLM`.
        speculative_config: the configuration to prove, a dict or "auto"; None for n-gram drafts, of which every one is verified.
        settings: further arguments of `LLM`; a `pools_folder` is neither read nor written.
        prompts: prompts of the greedy check.
        max_tokens: tokens per prompt in the greedy check.
        num_samples: samples per sampled check.
        progress: is called with a description of each step.

    Raises:
        ForerunError: the model or the configuration cannot be used.
    """
    if speculative_config is None:
        config = dict(DEFAULT_CONFIG)
    else:
        config = dict(AUTO_CONFIG if isinstance(speculative_config, str) else speculative_config)
    # answers kept here would take the place of users', and be drafted from by later proofs, whose seeds are the same
    settings = {**(settings or {}), "pools_folder": None}
    progress("loading the model")
    llm = LLM(model, **with_room_for_two(model, settings), speculative_config=config)
    greedy = check_greedy(llm, prompts, max_tokens=max_tokens, progress=progress)
    progress("sampled: exact probabilities of the target")
    experiment = plan_experiment(
        llm, num_tokens=NUM_NARROW_TOKENS, seed_text_ids=llm.get_tokenizer().encode(prompts[0])
    )
    name = llm.speculative.describe()
    progress(f"sampled: {num_samples} samples, {name}")
    sampled = [run_experiment(llm, experiment, num_samples=num_samples, name=name, seed=1)]
    progress(f"sampled: {num_samples} samples, adversarial drafts")
    # what some lossy verifiers are given fits drafts of the user's length alone
    num_tokens = NUM_ADVERSARIAL_TOKENS if llm.speculative.is_lossless else llm.speculative.num_speculative_tokens
    adversary = llm.with_speculation(
        {"method": AdversarialDrafter, "num_speculative_tokens": num_tokens, **verifier_part(config)}
    )
    sampled.append(run_experiment(adversary, experiment, num_samples=num_samples, name="adversarial", seed=10**6))
    return ProofReport(
        model=str(model),
        configuration=f"{name}, verified by {config.get('rejection_sample_method', 'matching')}",
        dtype=str(llm.dtype).removeprefix("torch."),
        is_lossless_by_design=llm.speculative.is_lossless,
        greedy=greedy,
        sampled=sampled,
    )
