"""Lets a draft model use another model's vocabulary: token-level intersection (TLI, arXiv 2502.05202)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from forerun.core.batch import ForwardBatch, ForwardResult
from forerun.models.base import CausalModel
from forerun.models.vocabulary import Vocabulary
from forerun.ops.attention import Attend
from forerun.ops.candidates import find_candidates


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyMap:
    """The correspondence of a target's tokens and a draft model's.

    Twins are pairs of tokens that mean the same.

    Attributes:
        target_ids: the target's tokens that have a twin, [n] int64, ascending.
        draft_ids: their twins, [n] int64, none twice.
        read_ids: for each token of the target the draft model's token that it is read as, its twin
            or the nearest token, [target's vocab_size] int64.
    """

    target_ids: Tensor
    draft_ids: Tensor
    read_ids: Tensor

    @property
    def num_twins(self) -> int:
        """How many tokens of the target the draft model can draft."""
        return len(self.target_ids)


def map_vocabulary(target: Vocabulary, draft: Vocabulary, *, vocab_size: int) -> VocabularyMap:
    """Pair the tokens of two vocabularies; `vocab_size` is the width of the target's logits.

    Tokens that spell text are twins if they spell the same bytes, marks if their content is the same.
    The tokens that end (begin) a text are twins if neither has another twin. A token without a twin is
    read as its longest ending that is a token of the draft model: the next token depends on the ending
    most.
    """
    twins = {
        target.text_ids[spelling]: draft.text_ids[spelling] for spelling in target.text_ids.keys() & draft.text_ids
    }
    taken = set(twins.values())
    marks = [(target_id, draft.marks.get(content)) for content, target_id in target.marks.items()]
    for target_id, draft_id in (*marks, (target.ends, draft.ends), (target.begins, draft.begins)):
        if target_id is not None and draft_id is not None and target_id not in twins and draft_id not in taken:
            twins[target_id] = draft_id
            taken.add(draft_id)
    pairs = torch.tensor(sorted(twins.items()), dtype=torch.int64).view(-1, 2)
    return VocabularyMap(
        target_ids=pairs[:, 0].contiguous(),
        draft_ids=pairs[:, 1].contiguous(),
        read_ids=torch.tensor(_readings(target, draft, twins, vocab_size=vocab_size)),
    )


def _readings(target: Vocabulary, draft: Vocabulary, twins: dict[int, int], *, vocab_size: int) -> list[int]:
    """Return the token that each token of the target is read as; padding rows of the logits are never read."""
    nothing = draft.unknown or 0
    readings = [nothing] * vocab_size
    strings = {token_id: content.encode() for content, token_id in target.marks.items()} | dict(target.spellings)
    for token_id, string in strings.items():
        reading = twins.get(token_id)
        if reading is None:
            reading = draft.ending_of(string)
        if reading is not None:
            readings[token_id] = reading
    for target_id, draft_id in ((target.begins, draft.begins), (target.ends, draft.ends)):
        if target_id is not None and draft_id is not None and target_id not in twins:
            readings[target_id] = draft_id
    return readings


class VocabularyMappedModel:
    """A `CausalModel` that reads and predicts tokens of another model's vocabulary.

    Each token is read as one of the model's own, so that its KV has an entry for each position. A token
    with a twin has the twin's logit. A token without has the lowest finite number rather than -inf, so
    that a request which allows such tokens only still has a distribution.
    """

    def __init__(self, model: CausalModel, vocabulary_map: VocabularyMap) -> None:
        self.vocab_size = len(vocabulary_map.read_ids)
        self.hidden_size = model.hidden_size
        self.num_layers = model.num_layers
        self.max_model_len = model.max_model_len
        self.kv_specs = model.kv_specs
        self.dtype = model.dtype
        self.device = model.device
        self.is_batch_invariant = model.is_batch_invariant
        self.finds_candidates = False
        self._model = model
        self._target_ids = vocabulary_map.target_ids.to(model.device)
        self._draft_ids = vocabulary_map.draft_ids.to(model.device)
        self._read_ids = vocabulary_map.read_ids.to(model.device)

    def number_of(self, draft_id: int) -> int:
        """Return an id beyond the vocabulary that is read as the model's own token `draft_id` and never predicted (a mask token)."""
        self._read_ids = torch.cat([self._read_ids, self._read_ids.new_tensor([draft_id])])
        return len(self._read_ids) - 1

    def forward(self, batch: ForwardBatch, attend: Attend) -> ForwardResult:
        """See `CausalModel.forward`; hidden states are the model's own."""
        read = replace(batch, token_ids=self._read_ids[batch.token_ids], num_candidates=0)
        result = self._model.forward(read, attend)
        own = result.logits
        logits = own.new_full((len(own), self.vocab_size), torch.finfo(own.dtype).min)
        logits.index_copy_(1, self._target_ids, own.index_select(1, self._draft_ids))
        candidates = find_candidates(logits, batch.num_candidates) if batch.num_candidates else None
        return replace(result, logits=logits, candidates=candidates)
