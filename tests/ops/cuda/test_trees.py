"""Trees that grow level by level in the device's table: by formula and on the kernels the same, and as the host grows them."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.core.draft import Draft
from forerun.drafters.base import DraftRequest
from forerun.drafters.guard import cut_draft
from forerun.drafters.neural.device_trees import levels_of
from forerun.drafters.neural.parallel import best_paths
from forerun.drafters.neural.tree import DraftedTokens, GrowingTree, StaticTree
from forerun.drafters.neural.writers import most_probable
from forerun.ops.cuda import trees
from forerun.ops.cuda.chains import ChainPlan
from forerun.ops.cuda.table import DeviceTable, StepRows
from forerun.ops.cuda.trees import ROOT, TreePlan
from tests.cuda import DEVICE, assert_equal_records, copy_of, ints
from tests.drafters.texts import sequence

from forerun.ops.cuda.kernels import trees as kernels  # isort: skip - tests.cuda comes first

NUM_SLOTS, MAX_LENGTH, MOST_DRAFTED, SCRATCH = 4, 40, 14, 20


@dataclass
class Growth:
    """Texts in a table, a plan to draft after some of them, and what a network would draft."""

    table: DeviceTable
    plan: ChainPlan
    trees: TreePlan
    shape: StaticTree
    block_size: int
    seed: int

    def drafted(self, n, depth, parent, width):
        """The tokens after row `parent` of a level, the first one first: `width` of them or fewer."""
        source = torch.Generator().manual_seed(self.seed + 1000 * n + 100 * depth + parent)
        count = int(torch.randint(-width, width + 1, (1,), generator=source))  # mostly as many as there may be
        count = width if count <= 0 else count
        return torch.randint(50, (count,), generator=source).tolist()


@st.composite
def shapes(draw):
    """Paths of a tree, each after its parent and its likelier siblings, level by level."""
    paths = [()]
    source = random.Random(draw(st.integers(0, 10**6)))
    for _ in range(draw(st.integers(1, 16))):
        above = source.choice(paths)
        paths.append((*above, sum(path[:-1] == above for path in paths if path)))
    return StaticTree(tuple(sorted(paths[1:], key=lambda path: (len(path), path))))


@st.composite
def growths(draw):
    block_size = draw(st.sampled_from([1, 4, 16]))
    num_blocks = -(-MAX_LENGTH // block_size)
    table = DeviceTable.empty(
        NUM_SLOTS, max_length=MAX_LENGTH, num_blocks=num_blocks, most_drafted=MOST_DRAFTED, device=DEVICE
    )
    table.lengths.copy_(ints(*(draw(st.integers(1, 30)) for _ in range(NUM_SLOTS))))
    table.draft_tokens.fill_(-9)
    table.draft_parents.fill_(-9)
    slots = draw(st.permutations(range(NUM_SLOTS)))[: draw(st.integers(1, NUM_SLOTS))]
    slots = [draw(st.sampled_from([slot, slot, slot, -1])) for slot in slots]
    depths = [draw(st.sampled_from([9, 3, 2, 1, 0])) for _ in slots]
    limits = [draw(st.sampled_from([MOST_DRAFTED, 5, 1])) if depth else 0 for depth in depths]
    source = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    blocks = torch.randperm(NUM_SLOTS * (num_blocks + SCRATCH), generator=source).view(NUM_SLOTS, -1)
    plan = ChainPlan(
        slots=ints(*slots),
        starts=ints(*(0 for _ in slots)),
        limits=ints(*limits),
        blocks=blocks.to(DEVICE, torch.int32),
    )
    of_trees = TreePlan(slots=plan.slots, limits=plan.limits, depths=ints(*depths))
    return Growth(table, plan, of_trees, draw(shapes()), block_size, draw(st.integers(0, 999)))


def grow(module, case):
    """The table with grown drafts, and the rows of each pass but the first, with their nodes."""
    table, levels = copy_of(case.table), levels_of(case.shape, DEVICE)
    count, passes = len(case.plan.slots), []
    nodes = torch.full((count, 1), ROOT, dtype=torch.int32, device=DEVICE)
    for depth, level in enumerate(levels):
        drafted = torch.full((count, nodes.shape[1], level.width), -1, dtype=torch.int32, device=DEVICE)
        for n in range(count):
            for parent in range(nodes.shape[1]):
                tokens = case.drafted(n, depth, parent, level.width)
                drafted[n, parent, : len(tokens)] = ints(*tokens)
        tokens, below = torch.full((2, count, len(level.parents)), -7, dtype=torch.int32, device=DEVICE)
        module.append(case.trees, table, level.growth, drafted, nodes, tokens, below, depth=depth)
        if not len(level.parents):
            break
        rows = StepRows.empty(tokens.numel(), 0, longest_path=depth + 1, device=DEVICE)
        columns = level.columns.expand(count, -1, -1)
        module.lay_out(case.plan, table, tokens, columns, rows, block_size=case.block_size)
        passes.append((rows, below))
        nodes = below
    return table, passes


@settings(max_examples=25, deadline=None)
@given(growths())
def test_kernels_grow_the_trees_of_the_formulas(case):
    (expected, expected_passes), (found, passes) = grow(trees, case), grow(kernels, case)
    assert_equal_records(found, expected)
    for (rows, nodes), (expected_rows, expected_nodes) in zip(passes, expected_passes, strict=True):
        assert_equal_records(rows, expected_rows)
        assert torch.equal(nodes, expected_nodes)


def grown_by_the_host(case, n):
    """The draft that a host's writer grows of the same tokens, and of each pass the nodes that it reads."""
    limit, deepest = int(case.plan.limits[n]), int(case.trees.depths[n])
    tree = GrowingTree(DraftRequest(sequence([1]), limit, deepest))
    rows, passes = [((), -1)] if deepest else [], []
    levels = levels_of(case.shape, DEVICE)
    shape_rows = [()]
    for depth, level in enumerate(levels):
        newest = []
        for path, node in rows:
            tokens = case.drafted(n, depth, shape_rows.index(path), level.width)[: case.shape.num_children(path)]
            newest += tree.add(node, DraftedTokens(tokens))
        rows = [(tree.ranks[node], node) for node in newest]
        rows = [(path, node) for path, node in rows if case.shape.num_children(path) and len(path) < deepest]
        passes.append([node for _, node in rows])
        shape_rows = [path for path in sorted(case.shape.paths) if len(path) == depth + 1]
        shape_rows = [path for path in shape_rows if case.shape.num_children(path)]
    draft = cut_draft(Draft(tuple(tree.token_ids), tuple(tree.parents)), max_tokens=limit, max_depth=deepest)
    return draft, passes


@settings(max_examples=60, deadline=None)
@given(growths())
def test_drafts_are_those_that_the_host_grows_of_the_same_tokens(case):
    table, passes = grow(trees, case)
    for n, slot in enumerate(case.plan.slots.tolist()):
        if slot < 0:
            assert all((nodes[n] == trees.NO_NODE).all() for _, nodes in passes)
            continue
        draft, expected = grown_by_the_host(case, n)
        size = int(table.draft_sizes[slot])
        assert table.draft_tokens[slot, :size].tolist() == list(draft.token_ids)
        assert table.draft_parents[slot, :size].tolist() == [draft.parent(node) for node in range(size)]
        assert (table.draft_tokens[slot, size:] == -9).all()
        for (_, nodes), own in zip(passes, expected, strict=False):
            assert [node for node in nodes[n].tolist() if node >= 0] == [node for node in own if node < size]
    for slot in set(range(NUM_SLOTS)) - {*case.plan.slots.tolist()}:
        assert table.draft_sizes[slot] == 0


@settings(max_examples=60, deadline=None)
@given(growths())
def test_a_row_sees_its_text_and_the_entries_of_its_own_path(case):
    table, passes = grow(trees, case)
    written = {}  # of each draft's node: where its entry lies
    for depth, (rows, nodes) in enumerate(passes):
        num_rows = nodes.shape[1]
        for row, node in enumerate(nodes.flatten().tolist()):
            slot, of_slot = int(rows.slots[row]), int(case.plan.slots[row // num_rows])
            if node < 0:
                assert (slot, int(rows.kv_slots[row])) == (-1, -1)
                continue
            assert slot == of_slot
            assert rows.tokens[row] == table.draft_tokens[slot, node]
            assert written.setdefault((slot, node), int(rows.kv_slots[row])) == rows.kv_slots[row]
            length, position = int(case.table.lengths[slot]), int(rows.positions[row])
            assert position == length + depth
            path, above = [], node
            while above >= 0:
                path.insert(0, above)
                above = int(table.draft_parents[slot, above])
            num_linear = int(rows.num_linear[row])
            linear = [place_of(case, slot, place) for place in range(num_linear)]
            seen = linear + rows.path_slots[row, : position + 1 - num_linear].tolist()
            text = [place_of(case, slot, place) for place in range(length)]
            assert seen == text + [written[slot, one] for one in path]
    assert len({*written.values()}) == len(written)


def place_of(case, slot, place):
    return int(case.plan.blocks[slot, place // case.block_size]) * case.block_size + place % case.block_size


@settings(max_examples=30, deadline=None)
@given(growths(), st.integers(1, 40), st.integers(1, MOST_DRAFTED))
def test_the_best_candidates_make_the_draft_that_the_host_makes_of_them(case, num_candidates, most):
    """Some as probable as others; a tree that is less deep has no candidates behind some number."""
    count, source = len(case.plan.slots), random.Random(case.seed)
    shape, there = (count, num_candidates), [source.randint(0, num_candidates) for _ in range(count)]
    tokens = torch.tensor([source.randrange(50) for _ in range(count * num_candidates)], dtype=torch.int32).view(shape)
    parents, scores = torch.zeros(shape, dtype=torch.int32), torch.full(shape, -torch.inf, dtype=torch.float64)
    for n in range(count):
        for one in range(num_candidates):
            above = parents[n, one] = source.randrange(-1, one)
            if one < there[n]:
                scores[n, one] = (scores[n, above] if above >= 0 else 0.0) - source.choice([0.0, 0.5, 1.0])
    tokens, parents, scores = (values.to(DEVICE) for values in (tokens, parents, scores))
    order = scores.sort(dim=1, descending=True, stable=True).indices[:, :most]
    found = []
    for module in (trees, kernels):
        table = copy_of(case.table)
        module.write_best(case.trees, table, order, tokens, parents, scores)
        found.append(table)
    assert_equal_records(found[1], found[0])
    for n, slot in enumerate(case.plan.slots.tolist()):
        if slot < 0:
            continue
        tree = GrowingTree(DraftRequest(sequence([1]), 1, 1), tokens[n].tolist(), parents[n].tolist())
        limit = min(int(case.plan.limits[n]), most, there[n])
        draft = most_probable(tree, scores[n].tolist(), limit)
        assert found[0].draft_sizes[slot] == len(draft)
        assert found[0].draft_tokens[slot, : len(draft)].tolist() == list(draft.token_ids)
        assert found[0].draft_parents[slot, : len(draft)].tolist() == list(draft.parents)


@st.composite
def predictions(draw):
    """Tokens and costs at each depth, some of which cost as much as others, nothing, or infinitely much."""
    num_depths, width = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    step = st.sampled_from([0.0, 0.0, 0.5, 1.0, 0.1, torch.inf])
    costs = [[draw(step) for _ in range(width)] for _ in range(NUM_SLOTS * num_depths)]
    costs = torch.tensor(costs).cumsum(1).view(NUM_SLOTS, num_depths, width)
    tokens = torch.arange(costs.numel(), dtype=torch.int32).view(costs.shape)
    return tokens.to(DEVICE), costs.to(DEVICE)


@settings(max_examples=60, deadline=None)
@given(growths(), predictions())
def test_the_cheapest_paths_make_the_draft_that_the_host_makes_of_them(case, predicted):
    tokens, costs = (values[: len(case.plan.slots)].contiguous() for values in predicted)
    found = []
    for module in (trees, kernels):
        table = copy_of(case.table)
        module.write_paths(case.trees, table, tokens, costs)
        found.append(table)
    assert_equal_records(found[1], found[0])
    for n, slot in enumerate(case.plan.slots.tolist()):
        if slot < 0:
            continue
        request = DraftRequest(sequence([1]), int(case.trees.limits[n]), int(case.trees.depths[n]))
        draft = best_paths(request, tokens[n].tolist(), costs[n].tolist())
        assert found[0].draft_sizes[slot] == len(draft)
        assert found[0].draft_tokens[slot, : len(draft)].tolist() == list(draft.token_ids)
        assert found[0].draft_parents[slot, : len(draft)].tolist() == list(draft.parents)
        assert (found[0].draft_tokens[slot, len(draft) :] == -9).all()
