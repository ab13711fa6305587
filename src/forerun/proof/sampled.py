"""The sampled check: a chi-square test of the whole engine's outputs over a narrow vocabulary.

Over a whole vocabulary the test would miss wrong verifiers: for a bug that shares one noise stream
between draft and residual, chi-square is near its mean over 4096 tokens, but a hundred times the
threshold over 16. So outputs are restricted to a few tokens, and whole paths of several tokens are
compared with the target's exact path probabilities.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from forerun.core.outputs import Origin
from forerun.core.sampling_params import SamplingParams
from forerun.llm import LLM
from forerun.proof.report import SampledFinding, Verdict

PATH_LENGTH = 3  # tokens per sample that are compared
NUM_BEYOND = 3  # sampled after these, since a draft is never longer than what is still to be written but one
LEAST_JUDGED = 0.25  # of the tokens that are compared, those at which a draft stood or fell, for each sample
MIN_EXPECTED = 5.0  # cells with a smaller expected count are merged (Cochran's rule)

ONE_IN_A_MILLION = 4.7534  # standard deviations, which a normal variable exceeds so seldom
TEMPERATURES = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 9.0)  # tried in order until enough paths are likely
MIN_LIKELY_SHARE = 0.25  # of all paths

Path = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NarrowExperiment:
    """A prompt, the few tokens allowed after it, and the exact probability of each path of these tokens."""

    prompt_ids: list[int]
    token_ids: list[int]
    temperature: float
    path_probs: Mapping[Path, float]


def plan_experiment(llm: LLM, *, num_tokens: int, seed_text_ids: Sequence[int]) -> NarrowExperiment:
    """Choose the target's most likely tokens after a text, and compute all path probabilities exactly.

    The prompt ends with those tokens repeated in a fixed pattern, in which prompt lookup finds matches.
    The temperature is raised until many paths are likely, since one likely path would test little.
    """
    first = llm.generate(
        {"prompt_token_ids": list(seed_text_ids)},
        SamplingParams(max_tokens=1, temperature=0, logprobs=num_tokens, detokenize=False, ignore_eos=True),
        use_tqdm=False,
    )[0]
    best = (first.outputs[0].logprobs or [{}])[0]
    token_ids = sorted(best, key=lambda t: -best[t].logprob)[:num_tokens]
    pattern = [token_ids[i % num_tokens] for i in (0, 1, 0, 2, 1, 3, 2, 0)]
    prompt_ids = [*seed_text_ids, *pattern * 3]
    logprobs = _next_token_logprobs(llm, prompt_ids, token_ids)
    paths = list(itertools.product(token_ids, repeat=PATH_LENGTH))
    for temperature in TEMPERATURES:
        path_probs = {path: _path_prob(logprobs, path, temperature) for path in paths}
        if _num_likely(path_probs) >= len(paths) * MIN_LIKELY_SHARE:
            break
    return NarrowExperiment(prompt_ids=prompt_ids, token_ids=token_ids, temperature=temperature, path_probs=path_probs)


def _next_token_logprobs(llm: LLM, prompt_ids: list[int], token_ids: list[int]) -> dict[Path, dict[int, float]]:
    """Logprob of each token after each prefix of a path, from the target's prompt logprobs, without drafts."""
    paths = list(itertools.product(token_ids, repeat=PATH_LENGTH))
    outputs = llm.generate(
        [{"prompt_token_ids": [*prompt_ids, *path]} for path in paths],
        SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False, speculation="off"),
        use_tqdm=False,
    )
    logprobs: dict[Path, dict[int, float]] = {}
    for path, output in zip(paths, outputs, strict=True):
        rows = (output.prompt_logprobs or [])[-PATH_LENGTH:]
        for depth, (token_id, row) in enumerate(zip(path, rows, strict=True)):
            assert row is not None, "only a sequence's first token has no logprob"
            logprobs.setdefault(path[:depth], {})[token_id] = row[token_id].logprob
    return logprobs


def _path_prob(logprobs: Mapping[Path, Mapping[int, float]], path: Path, temperature: float) -> float:
    """Probability of a path at a temperature if only the experiment's tokens are allowed."""
    prob = 1.0
    for depth, token_id in enumerate(path):
        row = logprobs[path[:depth]]
        largest = max(row.values())
        weights = {t: math.exp((logprob - largest) / temperature) for t, logprob in row.items()}
        prob *= weights[token_id] / sum(weights.values())
    return prob


def _num_likely(path_probs: Mapping[Path, float]) -> float:
    """Effective number of paths: the exponential of the entropy."""
    return math.exp(-sum(prob * math.log(prob) for prob in path_probs.values() if prob > 0))


def run_experiment(llm: LLM, experiment: NarrowExperiment, *, num_samples: int, name: str, seed: int) -> SampledFinding:
    """Sample paths with speculation on and test them against the exact probabilities.

    A text's first token comes from the prompt, and a draft for all that follow in its path must be allowed to be that long: so the
    texts are longer than what is compared of them.
    """
    llm.reset_stats()
    sampling = [
        SamplingParams(
            temperature=experiment.temperature,
            max_tokens=PATH_LENGTH + NUM_BEYOND,
            allowed_token_ids=experiment.token_ids,
            ignore_eos=True,
            detokenize=False,
            seed=seed + i,
        )
        for i in range(num_samples)
    ]
    outputs = llm.generate([{"prompt_token_ids": experiment.prompt_ids}] * num_samples, sampling, use_tqdm=False)
    counts = Counter(tuple(output.outputs[0].token_ids[:PATH_LENGTH]) for output in outputs)
    statistic, degrees = chi_square(counts, experiment.path_probs, num_samples)
    threshold = limit_of(degrees)
    stats = llm.stats.speculation
    origins = itertools.chain.from_iterable(output.outputs[0].origins[:PATH_LENGTH] for output in outputs)
    num_judged = sum(origin is not Origin.BONUS for origin in origins)
    is_tested = num_judged >= LEAST_JUDGED * num_samples and degrees > 0
    is_within = statistic <= threshold  # which a NaN is not
    verdict = Verdict.BUG if not is_within else Verdict.FITS if is_tested else Verdict.UNTESTED
    return SampledFinding(
        drafter=name,
        num_samples=num_samples,
        num_draft_tokens=stats.num_draft_tokens,
        num_accepted_tokens=stats.num_accepted_tokens,
        statistic=statistic,
        degrees_of_freedom=degrees,
        threshold=threshold,
        verdict=verdict,
    )


def limit_of(degrees: int) -> float:
    """What the statistic of a right verifier exceeds in one experiment of a million (Wilson and Hilferty, 1931)."""
    if not degrees:
        return 0.0
    variance = 2.0 / (9.0 * degrees)
    return degrees * (1.0 - variance + ONE_IN_A_MILLION * math.sqrt(variance)) ** 3


def chi_square(counts: Mapping[Path, int], probs: Mapping[Path, float], num_samples: int) -> tuple[float, int]:
    """Pearson's statistic and its degrees of freedom; rare cells are merged into one.

    Where all are rare one cell is left, of no degree of freedom: so few samples tell nothing. An outcome outside `probs` is
    impossible under the target: the statistic is then infinite.
    """
    if any(path not in probs for path in counts):
        return math.inf, len(probs) - 1
    statistic, num_cells = 0.0, 0
    rare_expected, rare_count = 0.0, 0
    for path, prob in probs.items():
        expected, count = prob * num_samples, counts.get(path, 0)
        if expected < MIN_EXPECTED:
            rare_expected += expected
            rare_count += count
            continue
        statistic += (count - expected) ** 2 / expected
        num_cells += 1
    if rare_expected > 0:
        statistic += (rare_count - rare_expected) ** 2 / max(rare_expected, MIN_EXPECTED)
        num_cells += 1
    return (statistic, num_cells - 1) if num_cells > 1 else (0.0, 0)
