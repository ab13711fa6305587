"""A small profile of an engine that never was, for the tests of all that reads profiles."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import forerun
from forerun.plan.acceptance import AcceptanceProfile
from forerun.plan.draft_trace import NOTHING, DraftTrace, TracedDraft, TracedText
from forerun.plan.profile import TRACES_FOLDER, Profile
from forerun.plan.step_times import DraftingCost, StepSample, StepTimeModel

WEIGHTS = (0.004, 0.00004, 0.00006, 0.00008, 0.00002, 0.0, 0.0, 0.0, 0.0, 0.00005, 1e-8, 1e-5, 3e-9)
"""Seconds: about a small model on two cores."""

SHAPES = [
    {"num_rows": sequences * (length + 1), "num_sequences": sequences, "num_context_tokens": sequences * context}
    for sequences in (1, 2, 4, 8, 16, 32)
    for length in (0, 1, 2, 3, 5, 8)
    for context in (128, 1024)
] + [
    {"num_rows": 0, "num_sequences": 0, "num_context_tokens": 0, "num_prompt_rows": rows, "num_prompt_context": before}
    for rows in (16, 64, 256, 1024)
    for before in (0, 512)
]


def samples_of(model: StepTimeModel, *, noise: float = 0.0, repeats: int = 1) -> list[StepSample]:
    """Steps of all shapes, as long as a model says, give or take."""
    source = random.Random(0)
    return [
        StepSample(**shape, seconds=model.seconds(**shape) * source.lognormvariate(0.0, noise))
        for _ in range(repeats)
        for shape in SHAPES
    ]


def random_trace(name: str = "suffix", *, num_texts: int = 6, num_tokens: int = 40, k: int = 4) -> DraftTrace:
    """Chains, some with chances, some empty; a text of few words."""
    source = random.Random(num_texts)

    def draft() -> TracedDraft:
        count = source.randint(0, k)
        if not count:
            return NOTHING
        survival = tuple(0.9 ** (depth + 1) for depth in range(count)) if source.random() < 0.5 else None
        return TracedDraft(
            count, None, survival, source.choice(["suffix", None]), tuple(range(source.randint(0, count)))
        )

    texts = [
        TracedText(
            kind=("code", "chat")[number % 2],
            num_prompt_tokens=10 + number,
            drafts=[NOTHING, *(draft() for _ in range(num_tokens - 1))],
        )
        for number in range(num_texts)
    ]
    return DraftTrace.of_texts(name, "suffix", k, texts)


TREE = (-1, -1, -1, 0, 0, 1, 3)
"""Parents: three roots; two children of the first, one of the second, a grandchild."""

CHANCES = (0.5, 0.2, 0.1)  # that the first, second, third of siblings is right, given that the one above is


def tree_trace(name: str, method: str, *, num_texts: int = 6, num_tokens: int = 120, knows: bool = True) -> DraftTrace:
    """Trees, of which the drafter knows the chances or not."""
    source = random.Random(len(name))
    siblings = [[node for node, parent in enumerate(TREE) if parent == above] for above in range(-1, len(TREE))]
    survival = [1.0] * (len(TREE) + 1)  # the root's chance last, where parents of -1 find it
    for below in siblings:
        for node, chance in zip(below, CHANCES, strict=False):
            survival[node] = survival[TREE[node]] * chance

    def draft() -> TracedDraft:
        right, at = [], -1
        while True:
            drawn = source.random()
            for node, chance in zip(siblings[at + 1], CHANCES, strict=False):
                drawn -= chance
                if drawn < 0.0:
                    right.append(node)
                    at = node
                    break
            else:
                return TracedDraft(len(TREE), TREE, tuple(survival[:-1]) if knows else None, None, tuple(right))

    texts = [
        TracedText(kind="chat", num_prompt_tokens=20, drafts=[NOTHING, *(draft() for _ in range(num_tokens - 1))])
        for _ in range(num_texts)
    ]
    return DraftTrace.of_texts(name, method, len(TREE), texts)


TREE_CONFIGS = {
    "recycle": {"method": "recycle", "num_speculative_tokens": len(TREE)},
    "static": {
        "method": "eagle3",
        "model": "some/head",
        "draft_tree": [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]],
    },
    "hybrid": {
        "method": "hybrid",
        "num_speculative_tokens": len(TREE),
        "drafters": [{"method": "suffix", "min_draft_tokens": 3}, {"method": "recycle", "num_speculative_tokens": 7}],
    },
    "auto": {"method": "auto"},
}


def tree_profile(folder: Path) -> Profile:
    """A profile of four configurations that draft trees, with their traces."""
    fake = fake_profile(folder)
    traces = {}
    for name, config in TREE_CONFIGS.items():
        traces[name] = folder / TRACES_FOLDER / f"{name}.npz"
        tree_trace(name, config["method"], knows=name == "auto").save(traces[name])
    profile = replace(
        fake,
        configs=TREE_CONFIGS,
        drafting=dict.fromkeys(TREE_CONFIGS, DraftingCost(seconds_per_step=2e-5)),
        acceptance={name: DraftTrace.load(path).acceptance() for name, path in traces.items()},
        traces=traces,
    )
    profile.save(folder)
    return profile


def fake_profile(folder: Path | None = None) -> Profile:
    """A profile of two configurations; with a folder it is saved there, with a draft trace of one of them."""
    trace = random_trace()
    traces = {}
    if folder is not None:
        path = folder / TRACES_FOLDER / "suffix.npz"
        path.parent.mkdir(parents=True)
        trace.save(path)
        traces["suffix"] = path
    acceptance = {"suffix": trace.acceptance(), "head": AcceptanceProfile(method="eagle3", conditional=(0.8, 0.7, 0.6))}
    for kind in ("chat", "code"):
        acceptance[f"suffix/{kind}"] = trace.acceptance(kind=kind)
    profile = Profile(
        model="tiny",
        machine="Some Processor, 2 cores",
        kernels="native avx2, 2 threads",
        dtype="bfloat16",
        version=forerun.__version__,
        gigabytes_per_second=40.0,
        weight_bytes=270_000_000,
        kv_bytes_per_token=46_080,
        vocab_size=49_152,
        num_blocks=2048,
        block_size=16,
        max_num_seqs=32,
        max_num_batched_tokens=2048,
        max_model_len=4096,
        step_times=StepTimeModel.fit(samples_of(StepTimeModel(WEIGHTS))),
        configs={
            "suffix": {"method": "suffix", "num_speculative_tokens": 4},
            "head": {"method": "eagle3", "model": "some/head", "num_speculative_tokens": 3},
        },
        drafting={"suffix": DraftingCost(seconds_per_step=2e-5), "head": DraftingCost(seconds_per_draft_token=4e-4)},
        acceptance=acceptance,
        traces=traces,
    )
    if folder is not None:
        profile.save(folder)
    return profile
