"""How differently a drafter does on different requests: some texts are easily guessed, others not at all.

Acceptance as one set of chances has every request alike but for luck, which a long answer averages out. What differs
between texts it does not, so it widens the distribution of time per token.
"""

from __future__ import annotations

import numpy as np

from forerun.plan.profile import Profile


def request_cv(profile: Profile, name: str, kind: str | None, num_draft_tokens: int) -> float:
    """Deviation over mean of the steps per token of requests, drafted by a configuration with so many tokens at most.

    From the drafts at the places of recorded texts, where the profile has them; else from the classes of
    prompts, each as frequent as the others; 0 where one class is all that is known.

    Raises:
        ConfigError: the trace is damaged.
    """
    if name in profile.traces:
        trace = profile.trace(name)
        after_first = {text: trace.num_answer_tokens(text) - 1 for text in trace.texts_of(kind)}
        return _cv([trace.num_steps(text, num_draft_tokens) / num for text, num in after_first.items() if num > 0])
    if kind is not None:
        return 0.0
    lengths = [
        found.expected(min(num_draft_tokens, found.num_places))
        for key, found in profile.acceptance.items()
        if key.startswith(f"{name}/")
    ]
    return _cv([1.0 / length for length in lengths])


def _cv(values: list[float]) -> float:
    return float(np.std(values) / np.mean(values)) if values else 0.0
