"""A small profile that was not measured: step times, rates and traces that tests can follow."""

from __future__ import annotations

import random

import forerun
from forerun.engine.costs import PRIOR
from forerun.plan.acceptance import AcceptanceProfile
from forerun.plan.draft_trace import DraftTrace, TracedDraft, TracedText
from forerun.plan.profile import Profile
from forerun.plan.step_times import DraftingCost, StepTimeModel

K = 4
STEP_TIMES = StepTimeModel([0.005 * weight for weight in (*PRIOR, 0.0, 1e-5)])


def a_text(number, *, kind="chat", length=40, rate=0.7, has_survival=True):
    """A text at whose places chains are right with a certain rate."""
    source, drafts = random.Random(number), []
    for _ in range(length):
        size = source.randint(0, K)
        num_right = next((i for i in range(size) if source.random() >= rate), size)
        survival = tuple(rate**i for i in range(1, size + 1)) if has_survival else None
        drafts.append(TracedDraft(size, None, survival, "suffix", tuple(range(num_right))))
    return TracedText(kind=kind, num_prompt_tokens=20 + number, drafts=drafts)


def a_trace(name="suffix", num_texts=6):
    """Texts of two kinds, those of "code" easier to draft."""
    texts = [a_text(i, kind="code" if i % 2 else "chat", rate=0.9 if i % 2 else 0.3) for i in range(num_texts)]
    return DraftTrace.of_texts(name, "suffix", K, texts)


def a_profile(folder, **changes):
    """A profile with plain decoding, rates, a fixed and an adaptive trace, saved in a folder."""
    configs = {
        "rates": {"method": "ngram", "num_speculative_tokens": 3},
        "suffix": {"method": "suffix", "num_speculative_tokens": K},
        "auto": {"method": "auto"},
    }
    traces = {}
    (folder / "draft_traces").mkdir(parents=True, exist_ok=True)
    for name in ("suffix", "auto"):
        traces[name] = folder / "draft_traces" / f"{name}.npz"
        a_trace(name).save(traces[name])
    rates = AcceptanceProfile(method="ngram", conditional=(0.8, 0.6, 0.5), proposed=(0.9, 0.7, 0.6))
    known = {
        "model": "tiny",
        "machine": "a machine",
        "kernels": "native",
        "dtype": "bfloat16",
        "version": forerun.__version__,
        "gigabytes_per_second": 40.0,
        "weight_bytes": 10**8,
        "kv_bytes_per_token": 1000,
        "vocab_size": 97,
        "num_blocks": 200,
        "block_size": 16,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 128,
        "max_model_len": 512,
        "watts": 50.0,
        "idle_watts": 10.0,
        "step_times": STEP_TIMES,
        "configs": configs,
        "drafting": dict.fromkeys(configs, DraftingCost(seconds_per_step=1e-4, seconds_per_draft_token=1e-5)),
        "acceptance": dict.fromkeys([*configs, "rates/code"], rates),
        "traces": traces,
    }
    profile = Profile(**(known | changes))
    profile.save(folder)
    return profile
