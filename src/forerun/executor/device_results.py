"""What a step on the device found, as the host reads it: packed into one tensor there, taken apart here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from forerun.core.draft import NO_DRAFT, Draft
from forerun.errors import ForerunError
from forerun.ops.cuda.table import Verdicts
from forerun.ops.grammar import GrammarNotReadyError
from forerun.ops.sampling import check_largest
from forerun.verify.base import Verdict


class DeviceResults(NamedTuple):
    """Of each sequence of a step."""

    verdicts: list[Verdict | None]  # None: nothing was to be judged, or nothing can be yet
    drafts: list[Draft]  # those that the device made for the next step


def pack(verdicts: Verdicts, largest: Tensor, drafts: Tensor | None) -> Tensor:
    """Put all that the host reads side by side, so that one copy is enough.

    Args:
        verdicts: of N sequences.
        largest: [N] fp32, the largest logit where the sequence's first token was drawn.
        drafts: [N, 1 + 2 * K] int32 of `AskedDrafts.drafts`, or None.
    """
    columns = [
        largest.view(torch.int32)[:, None],
        verdicts.num_accepted[:, None],
        verdicts.num_tokens[:, None],
        verdicts.accepted,
        verdicts.tokens,
    ]
    return torch.cat(columns if drafts is None else [*columns, drafts], dim=1)


def unpack(
    packed: Tensor,
    *,
    most_drafted: int,
    refused: Mapping[int, ForerunError],
    is_judged: Sequence[bool],
    source: str | None,
) -> DeviceResults:
    """Read what `pack` made.

    Args:
        packed: on the host.
        most_drafted: K.
        refused: why rules gave no answer, by the place of the sequence in the step.
        is_judged: whether something of each sequence was to be judged.
        source: who makes the drafts.
    """
    largest = packed[:, 0].clone().view(torch.float32).tolist()
    verdicts: list[Verdict | None] = []
    drafts: list[Draft] = []
    for i, (_, num_accepted, num_tokens, *lists) in enumerate(packed.tolist()):
        accepted, tokens = lists[:num_accepted], lists[most_drafted : most_drafted + num_tokens]
        num_drafted, *drafted = lists[2 * most_drafted + 1 :] or [0]
        drafts.append(_draft(drafted[:num_drafted], drafted[most_drafted:][:num_drafted], source))
        if not is_judged[i]:
            verdicts.append(None)
        elif i in refused:
            verdicts.append(_failure(refused[i]))
        else:
            verdicts.append(Verdict(tuple(accepted), tokens[-1]) if tokens else _failure(_reason(largest[i])))
    return DeviceResults(verdicts, drafts)


def _draft(token_ids: list[int], parents: list[int], source: str | None) -> Draft:
    """The draft of these nodes; without parents where it is a chain."""
    if not token_ids:
        return NO_DRAFT
    is_chain = parents == list(range(-1, len(parents) - 1))
    return Draft(tuple(token_ids), None if is_chain else tuple(parents), source=source)


def _failure(error: ForerunError) -> Verdict | None:
    """The verdict where nothing could be drawn; None where it can be in a later step."""
    if isinstance(error, GrammarNotReadyError):
        return None
    return Verdict((), 0, error=str(error), error_kind=error.kind)


def _reason(largest: float) -> ForerunError:
    """Why nothing could be drawn at a row whose largest logit is this."""
    try:
        check_largest(largest)
    except ForerunError as error:
        return error
    raise RuntimeError(f"the device drew nothing, though the largest logit is {largest}")
