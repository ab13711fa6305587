"""Drawing tokens by the kernels: the twin of `ops.draws.NumpySampler`, with the same tokens, for all rows in one call."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from ctypes import addressof

import torch
from torch import Tensor

from forerun.core.batch import Candidates
from forerun.core.host_arrays import address_of
from forerun.core.random_bits import MASK
from forerun.errors import ForerunError
from forerun.ops.draws import Draw, Drawn, NumpySampler, RowSampler
from forerun.ops.edits import RowEdits
from forerun.ops.native.library import Kernels, best_kernels
from forerun.ops.native.structs import DRAW_WORDS, RowEditsStruct, SamplingSettingsStruct
from forerun.ops.sampling import SamplingRules, check_largest
from forerun.ops.truncation import floor_of


def choose_sampler() -> RowSampler:
    """The kernels' sampler where there are kernels, whatever the target computes on; NumPy's elsewhere."""
    kernels = best_kernels()
    return NumpySampler() if kernels is None else NativeSampler(kernels)


class NativeSampler:
    """Implements `RowSampler`; rows are shared among the kernels' threads, and each is drawn by one of them."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._with_processors = NumpySampler()

    def draw(
        self, logits: Tensor, draws: Sequence[Draw], *, count: int = 1, candidates: Candidates | None = None
    ) -> list[Drawn]:
        """See `RowSampler`. Rows whose rules hold processors are drawn in NumPy."""
        results: list[Drawn] = [[]] * len(draws)
        words: list[int] = []
        places: list[int] = []  # in `draws`
        edits: list[_EditsInMemory] = []  # their addresses are in `words`
        for place, (row, rules, output_ids, path, seed, position) in enumerate(draws):
            if rules.has_processors:
                results[place] = self._with_processors.draw(logits, [draws[place]], count=count)[0]
                continue
            try:
                changes = rules.edits(output_ids, path)
            except ForerunError as error:
                results[place] = error
                continue
            address = 0
            if changes is not None:
                edits.append(_EditsInMemory(changes, logits.shape[1]))
                address = edits[-1].address
            words += (row, seed & MASK, position, settings_address(rules), address)
            places.append(place)
        if words:
            for place, drawn in zip(places, self._run(logits, words, count, candidates), strict=True):
                results[place] = drawn
        return results

    def _run(self, logits: Tensor, words: list[int], count: int, candidates: Candidates | None) -> list[Drawn]:
        table = array("Q", words)
        num_draws = len(table) // DRAW_WORDS
        if not logits.is_cpu:  # only the rows that are asked for
            logits = logits[torch.tensor(table[::DRAW_WORDS].tolist(), device=logits.device)].cpu()
            table[::DRAW_WORDS] = array("Q", range(num_draws))
            candidates = None
        if logits.dtype != torch.float32 or not logits.is_contiguous():
            logits = logits.float().contiguous()
        found = array("f") if candidates is None else candidates.on_host()[1]
        ids, largest = array("q", bytes(8 * num_draws * count)), array("f", bytes(4 * num_draws))
        self._kernels.sample(
            *(logits.data_ptr(), *logits.shape),
            *((None, 0) if candidates is None else (address_of(found), candidates.num_candidates)),
            *(address_of(table), num_draws, count, address_of(ids), address_of(largest)),
        )
        rows = range(0, len(ids), count)
        return [_drawn(ids[first : first + count].tolist(), logit) for first, logit in zip(rows, largest, strict=True)]


class _SettingsInMemory:
    """A request's numbers as the kernels read them."""

    def __init__(self, rules: SamplingRules) -> None:
        params = rules.params
        self._struct = SamplingSettingsStruct(
            top_p=params.top_p,
            top_k=min(max(params.top_k, 0), rules.vocab_size),
            temperature=0.0 if rules.is_greedy else params.temperature,
            floor=floor_of(params.min_p),
        )
        self.address = addressof(self._struct)


def settings_address(rules: SamplingRules) -> int:
    """The address of a request's numbers as the kernels read them; they live as long as its rules."""
    kept = rules.in_kernels
    if not isinstance(kept, _SettingsInMemory):
        kept = rules.in_kernels = _SettingsInMemory(rules)
    return kept.address


def _drawn(token_ids: list[int], largest: float) -> Drawn:
    if token_ids[0] >= 0:
        return token_ids if token_ids[-1] >= 0 else token_ids[: token_ids.index(-1)]
    try:
        check_largest(largest)
    except ForerunError as error:
        return error
    return []


class _EditsInMemory:
    """`RowEdits` as the kernels read them; keeps the arrays whose addresses it holds."""

    def __init__(self, edits: RowEdits, vocab_size: int) -> None:
        self._edits = edits
        self._struct = RowEditsStruct()
        struct, mask, penalised = self._struct, edits.mask, edits.penalised
        if edits.allowed is not None:
            struct.allowed, struct.num_allowed = edits.allowed.ctypes.data, len(edits.allowed)
        if mask is not None:
            if mask.shape != (vocab_size,) or not mask.flags.c_contiguous:
                raise ValueError(f"mask: got shape {list(mask.shape)}; must be a contiguous row of {vocab_size}")
            struct.mask = mask.ctypes.data
        if edits.forbidden is not None:
            struct.forbidden, struct.num_forbidden = edits.forbidden.ctypes.data, len(edits.forbidden)
        if edits.bias is not None:
            struct.biased, struct.bias = edits.bias.token_ids.ctypes.data, edits.bias.values.ctypes.data
            struct.num_biased = len(edits.bias.token_ids)
        if penalised is not None:
            struct.penalised, struct.counts = penalised.token_ids.ctypes.data, penalised.counts.ctypes.data
            struct.num_penalised = len(penalised.token_ids)
            struct.repetition, struct.frequency = penalised.repetition, penalised.frequency
            struct.presence = penalised.presence
        self.address = addressof(self._struct)
