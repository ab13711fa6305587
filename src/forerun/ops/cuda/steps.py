"""The integers of a step: its rows from the table, the match walk, what is committed, the KV that moves. Twin of `kernels.steps`.

A step calls `place` where the host has changed something, `prepare`, then the layers and `sampling.sample`, then `match`, `move` and `commit`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from forerun.ops.cuda.table import DevicePlan, DeviceTable, RuleTable, StepRows, Verdicts


def place(changes: Tensor, table: DeviceTable) -> None:
    """Write what the host has changed.

    Args:
        changes: [4, n] int32: of what (`table.BLOCK_TABLE` and so on), slot, column (0 where there is but one), value; each place
            once.
        table: changed.
    """
    changed = (table.block_table, table.draft_tokens, table.draft_parents, table.draft_sizes, table.computed)
    for what, slot, column, value in changes.T.tolist():
        changed[what].view(len(table.lengths), -1)[slot, column] = value


def prepare(plan: DevicePlan, table: DeviceTable, rows: StepRows, *, block_size: int) -> None:
    """Lay out the step's rows: of each planned sequence the tail, and its draft where the tail reaches the text's end.

    A sequence whose text has ended has none, though the host may not know that yet.

    Args:
        plan: which sequences, and how many rows of each; together at most T, and R of them to be judged.
        table: tokens, computed, ended, block_table and drafts are read.
        rows: written; rows that no sequence needs become padding, with token and position 0.
        block_size: places in a block of the cache.
    """
    for entries in (rows.tokens, rows.positions, rows.num_linear):
        entries.fill_(0)
    for entries in (rows.slots, rows.parents, rows.kv_slots, rows.judged):
        entries.fill_(-1)
    first = first_judged = 0
    for n, slot in enumerate(plan.slots.tolist()):
        rows.first_rows[n], rows.first_judged[n] = first, first_judged
        if slot < 0 or table.ended[slot]:
            continue
        start, tail = int(table.computed[slot]), int(plan.tails[n])
        most = int(plan.most_drafted[n]) if plan.ends[n] else 0
        parents = table.draft_parents[slot, : min(most, int(table.draft_sizes[slot]))].tolist()
        paths: list[list[int]] = []  # the nodes down to each
        for k in range(tail + len(parents)):
            row, node = first + k, k - tail
            rows.slots[row] = slot
            rows.kv_slots[row] = _kv_slot(table, slot, start + k, block_size)
            if node < 0:
                rows.tokens[row], rows.positions[row] = table.tokens[slot, start + k], start + k
                rows.parents[row], rows.num_linear[row] = row - 1 if k else -1, start + k + 1
                continue
            above = parents[node]
            paths.append([*(paths[above] if above >= 0 else []), node])
            rows.tokens[row] = table.draft_tokens[slot, node]
            rows.positions[row] = start + tail - 1 + len(paths[node])
            rows.parents[row] = first + tail + above
            num_linear = max((depth for depth, one in enumerate(paths[node], 1) if one == depth - 1), default=0)
            rows.num_linear[row] = start + tail + num_linear
            for i, one in enumerate(paths[node][num_linear:]):
                rows.path_slots[row, i] = _kv_slot(table, slot, start + tail + one, block_size)
        num_rows = tail + len(parents)
        if plan.ends[n]:
            num_judged = 1 + len(parents)
            rows.judged[first_judged : first_judged + num_judged] = torch.arange(
                first + tail - 1, first + num_rows, dtype=torch.int32, device=rows.judged.device
            )
            first_judged += num_judged
        first += num_rows
    rows.first_rows[-1], rows.first_judged[-1] = first, first_judged


def _kv_slot(table: DeviceTable, slot: int, place: int, block_size: int) -> int:
    return int(table.block_table[slot, place // block_size]) * block_size + place % block_size


def match(plan: DevicePlan, table: DeviceTable, rows: StepRows, sampled: Tensor, verdicts: Verdicts) -> None:
    """Walk down each draft while some child is the target's own token (see `verify.matching`).

    Where nothing could be drawn at a node, the draft counts for nothing; where that holds for the last committed token,
    `num_tokens` is 0 and the first of `tokens` is -1.

    Args:
        plan: slots, tails and ends are read.
        table: drafts are read.
        rows: `first_rows` is read; a sequence without rows has nothing to be judged.
        sampled: [T] int32, the target's token after each row, or -1.
        verdicts: written; nothing is committed where the plan's `ends` is 0.
    """
    verdicts.accepted.fill_(-1)
    verdicts.tokens.fill_(-1)
    verdicts.num_accepted.fill_(0)
    verdicts.num_tokens.fill_(0)
    for n, slot in enumerate(plan.slots.tolist()):
        if slot < 0 or not plan.ends[n] or rows.first_rows[n] == rows.first_rows[n + 1]:
            continue
        root = int(rows.first_rows[n] + plan.tails[n]) - 1
        num_nodes = int(rows.first_rows[n + 1]) - root - 1
        drafted = table.draft_tokens[slot, :num_nodes].tolist()
        parents = table.draft_parents[slot, :num_nodes].tolist()
        accepted: list[int] = []
        tokens = [int(sampled[root])]
        while True:
            above = accepted[-1] if accepted else -1
            nodes = (i for i in range(num_nodes) if parents[i] == above and drafted[i] == tokens[-1])
            node = next(nodes, None)
            if node is None:
                break
            accepted.append(node)
            tokens.append(int(sampled[root + 1 + node]))
        if tokens[-1] < 0:
            accepted, tokens = [], tokens[:1]
        for i, node in enumerate(accepted):
            verdicts.accepted[n, i] = node
        for i, token_id in enumerate(tokens):
            verdicts.tokens[n, i] = token_id
        verdicts.num_accepted[n] = len(accepted)
        verdicts.num_tokens[n] = len(tokens) if tokens[0] >= 0 else 0


def move(plan: DevicePlan, rows: StepRows, verdicts: Verdicts, entries: Tensor) -> None:
    """Move what lies at the accepted nodes' slots to the places behind the tail, where the text's next tokens belong.

    Args:
        plan: slots and tails are read.
        rows: `kv_slots` and `first_rows` are read.
        verdicts: of `match`.
        entries: [C, num_slots, ...] contiguous: keys, values or features of C layers; changed in place.
    """
    for n, slot in enumerate(plan.slots.tolist()):
        if slot < 0:
            continue
        first = int(rows.first_rows[n] + plan.tails[n])
        for i, node in enumerate(verdicts.accepted[n, : int(verdicts.num_accepted[n])].tolist()):
            entries[:, rows.kv_slots[first + i]] = entries[:, rows.kv_slots[first + node]].clone()


def commit(plan: DevicePlan, table: DeviceTable, rules: RuleTable, verdicts: Verdicts) -> None:
    """Append what was committed to the texts, count it for penalties, forget the drafts that were judged, and note what has ended.

    A text ends by one of its stop tokens, by its length, beyond which nothing is written, or where nothing could be drawn.

    Args:
        plan: slots, tails and ends are read.
        table: tokens, lengths, computed, ended and draft_sizes are changed, of texts that have not ended before.
        rules: counts are changed; min_length, max_length and stop_ids are read.
        verdicts: of `match`.
    """
    for n, slot in enumerate(plan.slots.tolist()):
        if slot < 0 or table.ended[slot]:
            continue
        length, longest = int(table.lengths[slot]), min(int(rules.max_length[slot]), table.tokens.shape[1])
        token_ids = verdicts.tokens[n, : int(verdicts.num_tokens[n])].tolist()[: max(0, longest - length)]
        stop_ids, min_length = set(rules.stop_ids[slot].tolist()), int(rules.min_length[slot])
        for place, token_id in enumerate(token_ids, start=length):
            table.tokens[slot, place] = token_id
            rules.counts[slot, token_id] += 1
            if place + 1 >= longest or (token_id in stop_ids and place + 1 >= min_length):
                table.ended[slot] = 1
        table.lengths[slot] += len(token_ids)
        table.computed[slot] += plan.tails[n] + verdicts.num_accepted[n]
        if plan.ends[n]:
            table.draft_sizes[slot] = 0
            if not token_ids:
                table.ended[slot] = 1
