"""The integers of a step: its rows from the table, the match walk, what is committed, the KV that moves. Twin of `kernels.steps`.

A step calls `prepare`, then the layers and `sampling.sample`, then `match`, `move` and `commit`.
"""

from __future__ import annotations

from torch import Tensor

from forerun.ops.cuda.table import DevicePlan, DeviceTable, RuleTable, StepRows, Verdicts


def prepare(plan: DevicePlan, table: DeviceTable, rows: StepRows, *, block_size: int) -> None:
    """Lay out the step's rows: of each planned sequence the tail, and its draft where the tail reaches the text's end.

    Args:
        plan: which sequences, and how many rows of each; together at most T.
        table: tokens, computed, block_table and drafts are read.
        rows: written; rows that no sequence needs become padding, with token and position 0.
        block_size: places in a block of the cache.
    """
    for entries, value in ((rows.tokens, 0), (rows.positions, 0), (rows.slots, -1), (rows.parents, -1)):
        entries.fill_(value)
    rows.kv_slots.fill_(-1)
    rows.num_linear.fill_(0)
    first = 0
    for n, slot in enumerate(plan.slots.tolist()):
        rows.first_rows[n] = first
        if slot < 0:
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
        first += tail + len(parents)
    rows.first_rows[-1] = first


def _kv_slot(table: DeviceTable, slot: int, place: int, block_size: int) -> int:
    return int(table.block_table[slot, place // block_size]) * block_size + place % block_size


def match(plan: DevicePlan, table: DeviceTable, rows: StepRows, sampled: Tensor, verdicts: Verdicts) -> None:
    """Walk down each draft while some child is the target's own token (see `verify.matching`).

    Where nothing could be drawn at a node, the draft counts for nothing; where that holds for the last committed token,
    `num_tokens` is 0 and the first of `tokens` is -1.

    Args:
        plan: slots, tails and ends are read.
        table: drafts are read.
        rows: `first_rows` is read.
        sampled: [T] int32, the target's token after each row, or -1.
        verdicts: written; nothing is committed where the plan's `ends` is 0.
    """
    verdicts.accepted.fill_(-1)
    verdicts.tokens.fill_(-1)
    verdicts.num_accepted.fill_(0)
    verdicts.num_tokens.fill_(0)
    for n, slot in enumerate(plan.slots.tolist()):
        if slot < 0 or not plan.ends[n]:
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
    """Append what was committed to the texts, count it for penalties, and forget the drafts that were judged.

    Args:
        plan: slots, tails and ends are read.
        table: tokens, lengths, computed and draft_sizes are changed.
        rules: counts are changed.
        verdicts: of `match`.
    """
    for n, slot in enumerate(plan.slots.tolist()):
        if slot < 0:
            continue
        length, num_tokens = int(table.lengths[slot]), int(verdicts.num_tokens[n])
        for i, token_id in enumerate(verdicts.tokens[n, :num_tokens].tolist()):
            table.tokens[slot, length + i] = token_id
            rules.counts[slot, token_id] += 1
        table.lengths[slot] += num_tokens
        table.computed[slot] += plan.tails[n] + verdicts.num_accepted[n]
        if plan.ends[n]:
            table.draft_sizes[slot] = 0
