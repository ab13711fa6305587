"""Slips that cost acceptance and no text: each is planted by a function of (monkeypatch, head), which returns the head to serve.

Those of a drafter are patched in. Those of a reader are done to the checkpoint instead: a right reader of the
damaged head computes what a wrong reader of the right one would.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from forerun.drafters.neural.forward import PagedPasses, last_hidden_states
from forerun.drafters.neural.kv import KVLedger
from forerun.models.heads.dflash import DFlashHead


def features_from(offset):
    """A token's state is read `offset` places beside the token before it."""

    def plant(monkeypatch, head):
        slots, text = PagedPasses._slots, PagedPasses._text_rows

        def slots_beside(self, sequence, places):
            beside = [min(max(place + offset, 0), sequence.draft_start - 1) for place in places]
            return [slot for place in beside for slot in slots(self, sequence, range(place, place + 1))]

        def text_of(self, *args, **options):
            with monkeypatch.context() as reading:
                reading.setattr(PagedPasses, "_slots", slots_beside)
                return text(self, *args, **options)

        monkeypatch.setattr(PagedPasses, "_text_rows", text_of)
        return head

    return plant


def entries_of_drafts_are_kept(monkeypatch, head):
    """After a text's first draft no entry is made anew from the target's own features."""
    num_valid, drafted = KVLedger.num_valid, set()

    def stale(self, sequence, block_ids, num_computed):
        if sequence.seq_id in drafted:
            return num_computed
        drafted.add(sequence.seq_id)
        return num_valid(self, sequence, block_ids, num_computed)

    monkeypatch.setattr(KVLedger, "num_valid", stale)
    return head


def any_block_is_trusted(monkeypatch, head):
    """Whatever lies in a block counts as the entries of this text."""
    monkeypatch.setattr(KVLedger, "num_valid", lambda self, sequence, block_ids, num_computed: num_computed)
    return head


def positions_begin_anew(monkeypatch, head):
    """The positions of drafted tokens are counted from the text's end."""
    forward = PagedPasses.forward

    def anew(self, listed):
        for rows in listed:
            if rows.start >= rows.sequence.draft_start:
                rows.positions = [rows.start - rows.sequence.draft_start + 1]
        return forward(self, listed)

    monkeypatch.setattr(PagedPasses, "forward", anew)
    return head


def masks_from(offset):
    """Masks stand `offset` places beside where they are."""

    def plant(monkeypatch, head):
        forward = PagedPasses.forward

        def beside(self, listed):
            for rows in listed:
                places = range(rows.start, rows.start + len(rows.token_ids))
                rows.positions = [place + offset * (place >= rows.sequence.draft_start) for place in places]
            return forward(self, listed)

        monkeypatch.setattr(PagedPasses, "forward", beside)
        return head

    return plant


OF_AUTOREGRESSIVE = {
    "features one place late": features_from(1),
    "features one place early": features_from(-1),
    "entries of drafts are kept": entries_of_drafts_are_kept,
    "any block is trusted": any_block_is_trusted,
    "positions begin anew": positions_begin_anew,
}
"""What can go wrong in every drafter with a head over KV of its own."""


def needing(head_class, name):
    """The head gets another feature than the one it was trained on."""

    def plant(monkeypatch, head):
        begin = head_class.__init__

        def other(self, *args, **options):
            begin(self, *args, **options)
            self.needs = (name,)

        monkeypatch.setattr(head_class, "__init__", other)
        return head

    return plant


def in_the_layer(head_class):
    """A head on the target's last state, after the norm, gets one from before."""
    return {
        "before the final norm": needing(head_class, "hidden.3"),
        "one layer early": needing(head_class, "hidden.2"),
    }


def swapped(*names):
    """The two halves of what these matrices read are put together in the other order."""

    def plant(monkeypatch, head):
        halves = {name: head.tensors[name].chunk(2, dim=1) for name in names}
        return replace(
            head, tensors={**head.tensors, **{name: torch.cat([b, a], 1) for name, (a, b) in halves.items()}}
        )

    return plant


def configured(**changes):
    """Keys of config.json are read wrongly."""
    return lambda monkeypatch, head: replace(head, config={**head.config, **changes})


def without_d2t(monkeypatch, head):
    """Draft ids are taken for the target's."""
    offsets, drafted = torch.zeros_like(head.tensors["d2t"]), head.tensors["t2d"].sort(descending=True).values
    return replace(head, tensors={**head.tensors, "d2t": offsets, "t2d": drafted})


def renamed(names):
    """Tensors whose names begin so are taken for others'."""

    def plant(monkeypatch, head):
        def other(name):
            return next((new + name.removeprefix(old) for old, new in names.items() if name.startswith(old)), name)

        return replace(head, tensors={other(name): tensor for name, tensor in head.tensors.items()})

    return plant


def last_hidden_states_from(offset, *, reader):
    """The module `reader` of drafters takes a text's last state `offset` places beside its last computed token."""

    def plant(monkeypatch, head):
        def beside(hidden_states, requests, *, block_size):
            moved = [replace(request, num_computed=request.num_computed + offset) for request in requests]
            return last_hidden_states(hidden_states, moved, block_size=block_size)

        monkeypatch.setattr(f"forerun.drafters.{reader}.last_hidden_states", beside)
        return head

    return plant


def dflash_features_from(offset):
    """A place's entry is made of features `offset` places beside."""

    def plant(monkeypatch, head):
        context = DFlashHead.context

        def beside(self, features, positions):
            return context(self, [rows.roll(-offset, dims=0) for rows in features], positions)

        monkeypatch.setattr(DFlashHead, "context", beside)
        return head

    return plant
