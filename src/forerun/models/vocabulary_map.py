"""A model behind another model's vocabulary: token-string intersection (TLI, arXiv 2502.05202)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from forerun.core.batch import ForwardBatch, ForwardResult
from forerun.models.base import CausalModel
from forerun.models.vocabulary import Vocabulary
from forerun.ops.attention.base import Attend


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyMap:
    """Between the tokens of a target and those of a draft model.

    Twins are pairs of tokens that say the same: `target_ids` [n] int64 ascending, `draft_ids` [n]
    int64, no token twice. `read_ids` [target's vocab_size] int64 is the draft model's token that each
    of the target's is read as: its twin, else the nearest thing.
    """

    target_ids: Tensor
    draft_ids: Tensor
    read_ids: Tensor

    @property
    def num_twins(self) -> int:
        """Tokens that the draft model can say."""
        return len(self.target_ids)


def map_vocabulary(target: Vocabulary, draft: Vocabulary, *, vocab_size: int) -> VocabularyMap:
    """Pair the tokens of two vocabularies; `vocab_size` is the width of the target's logits.

    Tokens that spell text are twins if they spell the same bytes, marks if their content is the same;
    what ends (begins) a text in one is then the twin of what ends (begins) it in the other, if both
    are still single. A token without a twin is read as the longest ending of it that is a
    token of the draft model: what comes next depends on the ending most.
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
    """What each token is read as; padding rows of the logits have no meaning and are never read."""
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
    """A `CausalModel` that takes and judges tokens of another model's vocabulary.

    Each token is read as one token of the model's own, so its KV has an entry for each place of the
    text. A token with a twin has the twin's logit. One without has the lowest number there is rather
    than -inf: it is never likely, yet a request that allows such tokens only still has a distribution.
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
        self._model = model
        self._target_ids = vocabulary_map.target_ids.to(model.device)
        self._draft_ids = vocabulary_map.draft_ids.to(model.device)
        self._read_ids = vocabulary_map.read_ids.to(model.device)

    def number_of(self, draft_id: int) -> int:
        """A number behind the vocabulary that is read as the model's own token `draft_id`, whatever the map; it is never judged."""
        self._read_ids = torch.cat([self._read_ids, self._read_ids.new_tensor([draft_id])])
        return len(self._read_ids) - 1

    def forward(self, batch: ForwardBatch, attend: Attend) -> ForwardResult:
        """See `CausalModel.forward`; features are the model's own."""
        result = self._model.forward(replace(batch, token_ids=self._read_ids[batch.token_ids]), attend)
        own = result.logits
        logits = own.new_full((len(own), self.vocab_size), torch.finfo(own.dtype).min)
        logits.index_copy_(1, self._target_ids, own.index_select(1, self._draft_ids))
        return replace(result, logits=logits)
