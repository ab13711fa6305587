"""A drafter of one's own: after each pair of tokens, bet on the token that followed it last time."""

import sys

from forerun import LLM, Draft, SamplingParams
from forerun.core.sequence import Sequence
from forerun.drafters.base import DraftContext, DraftRequest, TargetInfo


class PairDrafter:
    needs: frozenset[str] = frozenset()  # features of the target; this drafter looks at tokens only

    def __init__(self, _target: TargetInfo) -> None:
        self.followers: dict[int, dict[tuple[int, ...], int]] = {}  # of each sequence: pair -> the token after it

    def start(self, sequence: Sequence) -> None:
        self.followers[sequence.seq_id] = {}

    def propose(self, context: DraftContext) -> list[Draft]:
        return [self.draft(request) for request in context.requests]

    def stop(self, sequence: Sequence) -> None:
        del self.followers[sequence.seq_id]

    def draft(self, request: DraftRequest) -> Draft:
        text, followers = request.sequence.tokens_from(0), self.followers[request.sequence.seq_id]
        followers.update({(a, b): c for a, b, c in zip(text, text[1:], text[2:], strict=False)})
        path, limit = text[-2:], min(request.max_tokens, request.max_depth)
        while len(path) < 2 + limit and tuple(path[-2:]) in followers:
            path.append(followers[tuple(path[-2:])])
        return Draft(tuple(path[2:]))


if __name__ == "__main__":
    model = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"
    llm = LLM(model, speculative_config={"method": PairDrafter, "num_speculative_tokens": 4})
    (result,) = llm.generate(["One, two, three. One, two,"], SamplingParams(temperature=0, max_tokens=64))
    print(result.outputs[0].text)
    print(f"{result.speculation.acceptance_length:.2f} tokens per step")
