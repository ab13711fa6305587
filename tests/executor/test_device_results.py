"""What the device found comes to the host in one tensor: verdicts, their failures, and drafts."""

from __future__ import annotations

import pytest
import torch

from forerun.core.draft import NO_DRAFT, Draft
from forerun.errors import RequestError
from forerun.executor.device_results import pack, unpack
from forerun.ops.cuda.table import Verdicts
from forerun.ops.grammar import GrammarNotReadyError
from forerun.verify.base import Verdict

MOST_DRAFTED = 3


def found(accepted=(), token_ids=(), *, largest=1.0, drafted=(), parents=None, refused=None, is_judged=True):
    """What is read of one sequence beside another."""
    verdicts = Verdicts.empty(2, MOST_DRAFTED, device=torch.device("cpu"))
    verdicts.num_accepted[1], verdicts.num_tokens[1] = len(accepted), len(token_ids)
    verdicts.accepted[1, : len(accepted)] = torch.tensor(accepted, dtype=torch.int32)
    verdicts.tokens[1, : len(token_ids)] = torch.tensor(token_ids, dtype=torch.int32)
    parents = range(-1, len(drafted) - 1) if parents is None else parents
    drafts = torch.full((2, 1 + 2 * MOST_DRAFTED), 9, dtype=torch.int32)
    drafts[0, 0] = 0
    drafts[1, : 1 + len(drafted)] = torch.tensor([len(drafted), *drafted])
    drafts[1, 1 + MOST_DRAFTED :][: len(drafted)] = torch.tensor([*parents])
    packed = pack(verdicts, torch.tensor([0.0, largest]), drafts if drafted else None)
    results = unpack(
        packed,
        most_drafted=MOST_DRAFTED,
        refused={} if refused is None else {1: refused},
        is_judged=[False, is_judged],
        source="ngram",
    )
    assert (results.verdicts[0], results.drafts[0]) == (None, NO_DRAFT)
    return results.verdicts[1], results.drafts[1]


@pytest.mark.parametrize("drafted", [(), (4,), (4, 5, 6)])
@pytest.mark.parametrize("accepted", [(), (1,), (0, 1, 2)])
def test_the_accepted_path_and_the_token_after_it(accepted, drafted):
    verdict, draft = found(accepted, [*range(10, 10 + len(accepted)), 7], drafted=drafted)
    assert verdict == Verdict(accepted, 7)
    assert draft == (Draft(drafted, source="ngram") if drafted else NO_DRAFT)


@pytest.mark.parametrize("parents", [(-1, -1), (-1, 0, 0), (-1, -1, 1)])
def test_a_tree_is_read_with_the_parents_of_its_nodes(parents):
    drafted = (4, 5, 6)[: len(parents)]
    _, draft = found((0,), (4, 7), drafted=drafted, parents=parents)
    assert draft == Draft(drafted, parents, source="ngram")


@pytest.mark.parametrize(
    ("largest", "says"), [(torch.nan, "largest is nan"), (torch.inf, "largest is inf"), (-torch.inf, "every token")]
)
def test_why_nothing_was_drawn_is_read_from_the_largest_logit(largest, says):
    assert says in found(largest=largest)[0].error


def test_rules_without_an_answer_give_their_own_error_or_none_yet():
    assert found(largest=-torch.inf, refused=RequestError("too much work"))[0].error == "too much work"
    assert found(largest=-torch.inf, refused=GrammarNotReadyError("ask again"))[0] is None


def test_what_was_not_judged_has_no_verdict():
    assert found(is_judged=False)[0] is None
