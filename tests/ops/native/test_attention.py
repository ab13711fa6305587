"""Attention by the kernels against the oracle, and that a row's bits depend on its own text alone."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.core.batch import LayerKVSpec, SequenceRows
from forerun.kv.cache import KVCache
from forerun.ops.attention.naive import NaiveAttention
from forerun.ops.native.attention import MOST_KEY_DIM, NativeAttention, can_attend
from tests.native import every_level, every_stored_dtype, generator, threads
from tests.ops.native.passes import (
    CPU,
    cache_copy,
    deal_blocks,
    filled_cache,
    levels_batch,
    make_batch,
    random_batch,
    slots_of,
    source,
    tree_mask,
)

# --- agreement ------------------------------------------------------------------------------------

LENGTHS = st.lists(
    st.tuples(st.one_of(st.integers(0, 20), st.integers(230, 560)), st.one_of(st.just(1), st.integers(2, 24))),
    min_size=1,
    max_size=4,
)
DIMS = st.one_of(
    st.sampled_from([(8, 8), (16, 16), (32, 96), (64, 64), (80, 80), (96, 32), (128, 128), (256, 256)]),
    st.tuples(st.integers(1, 40).map(lambda n: 2 * n), st.integers(1, 70)),
)


def attend_both(kernels, batch, num_blocks, *, heads, dims, dtype, seed, sinks=None, **options):
    """The same pass by the kernels in `dtype` and by the oracle in fp64: (output, cache) of each; and the weighted
    magnitudes of the values, by which rounding errors are judged."""
    spec = LayerKVSpec(num_kv_heads=heads[1], key_dim=dims[0], value_dim=dims[1])
    cache = filled_cache([spec], num_blocks=num_blocks, block_size=batch.block_size, dtype=dtype, seed=seed)
    random, num_rows = generator(seed + 1), len(batch.positions)
    shapes = [(heads[0], dims[0]), (heads[1], dims[0]), (heads[1], dims[1])]
    rows = [torch.randn(num_rows, *shape, generator=random).to(dtype) for shape in shapes]
    if sinks:
        options["sinks"] = torch.randn(heads[0], generator=random)

    def attend(attention, cache, rows):
        return attention.begin(batch, cache)(0, *rows, scale=dims[0] ** -0.5, **options), cache.layers[0]

    wide_cache, wide_rows = cache_copy(cache, dtype=torch.float64), [x.double() for x in rows]
    positive = cache_copy(cache, dtype=torch.float64)
    positive.layers[0].value.abs_()
    magnitudes, _ = attend(NaiveAttention(), positive, [*wide_rows[:2], wide_rows[2].abs()])
    return attend(NativeAttention(kernels), cache, rows), attend(NaiveAttention(), wide_cache, wide_rows), magnitudes


def assert_agree(results, *, dtype):
    """fp32 scores of a few units err by 1e-6 or so, and weights with them; in bf16 each weight is rounded, to 2^-8 of it,
    and what comes out."""
    (found, found_kv), (exact, exact_kv), magnitudes = results
    rounding = {torch.float32: 0.0, torch.bfloat16: 2.0**-7}[dtype]
    assert ((found.double() - exact).abs() <= 2e-5 + rounding * magnitudes).all()
    assert torch.equal(found_kv.key.double(), exact_kv.key)
    assert torch.equal(found_kv.value.double(), exact_kv.value)


@every_level
@every_stored_dtype
@settings(max_examples=20)
@given(
    lengths=LENGTHS,
    seed=st.integers(0, 2**20),
    heads=st.sampled_from([(1, 1), (4, 4), (4, 2), (9, 3), (14, 2), (32, 1)]),
    dims=DIMS,
    block_size=st.sampled_from([1, 3, 4, 7, 16, 40]),
    window=st.one_of(st.none(), st.integers(1, 20), st.integers(200, 400)),
    soft_cap=st.one_of(st.none(), st.just(1.5)),
    sinks=st.booleans(),
)
def test_attention_agrees_with_the_oracle(
    kernels, dtype, lengths, seed, heads, dims, block_size, window, soft_cap, sinks
):
    batch, num_blocks = random_batch(source(seed), lengths, block_size=block_size)
    options = {"window": window, "soft_cap": soft_cap, "sinks": sinks}
    assert_agree(
        attend_both(kernels, batch, num_blocks, heads=heads, dims=dims, dtype=dtype, seed=seed, **options), dtype=dtype
    )


@every_level
@every_stored_dtype
@settings(max_examples=20)
@given(
    lengths=LENGTHS,
    seed=st.integers(0, 2**20),
    dims=st.sampled_from([(16, 16), (32, 64)]),
    block_size=st.sampled_from([1, 3, 16]),
)
def test_a_mask_over_earlier_levels_and_hidden_places_agree_with_the_oracle(
    kernels, dtype, lengths, seed, dims, block_size
):
    batch, num_blocks = levels_batch(source(seed), lengths, block_size=block_size)
    results = attend_both(kernels, batch, num_blocks, heads=(4, 2), dims=dims, dtype=dtype, seed=seed)
    assert_agree(results, dtype=dtype)


@every_level
@every_stored_dtype
@pytest.mark.parametrize("dims", [(16, 16), (64, 64)], ids=str)
@pytest.mark.parametrize("context", [255, 256, 511, 512])
def test_contexts_at_the_edges_of_tiles_agree(kernels, dtype, dims, context):
    batch, num_blocks = random_batch(source(0), [(context, 1), (context, 4)], block_size=16)
    assert_agree(attend_both(kernels, batch, num_blocks, heads=(4, 2), dims=dims, dtype=dtype, seed=0), dtype=dtype)


@every_level
@every_stored_dtype
@pytest.mark.parametrize("heads", [(32, 1), (33, 1), (71, 1), (96, 2)])
def test_more_query_heads_than_one_item_holds_agree(kernels, dtype, heads):
    batch, num_blocks = random_batch(source(0), [(20, 3), (5, 1)], block_size=4)
    assert_agree(attend_both(kernels, batch, num_blocks, heads=heads, dims=(32, 32), dtype=dtype, seed=0), dtype=dtype)


@pytest.mark.parametrize(
    ("key_dims", "can"), [([8, 128], True), ([MOST_KEY_DIM], True), ([8, 7], False), ([MOST_KEY_DIM + 2], False)]
)
def test_sizes_that_the_kernels_do_not_have_are_told(key_dims, can):
    assert can_attend([LayerKVSpec(num_kv_heads=1, key_dim=dim, value_dim=7) for dim in key_dims]) is can


@every_level
@every_stored_dtype
@pytest.mark.parametrize("value_dim", [6, MOST_KEY_DIM, MOST_KEY_DIM + 32])
def test_the_widest_keys_agree(kernels, dtype, value_dim):
    batch, num_blocks = random_batch(source(0), [(20, 3)], block_size=4)
    dims = MOST_KEY_DIM, value_dim
    assert_agree(attend_both(kernels, batch, num_blocks, heads=(2, 1), dims=dims, dtype=dtype, seed=0), dtype=dtype)


@every_level
def test_query_key_and_value_may_be_views(kernels):
    batch, num_blocks = random_batch(source(0), [(20, 3), (5, 1)], block_size=4)
    spec = LayerKVSpec(num_kv_heads=2, key_dim=8, value_dim=8)
    cache = filled_cache([spec], num_blocks=num_blocks, block_size=4, dtype=torch.float32)
    fused = torch.randn(4, 8, 8)
    parts = fused[:, :4], fused[:, 4:6], fused[:, 6:]
    found = [
        NativeAttention(kernels).begin(batch, cache_copy(cache, dtype=torch.float32))(0, *rows, scale=0.3)
        for rows in (parts, [part.clone() for part in parts])
    ]
    assert torch.equal(*found)


@every_level
@every_stored_dtype
@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("options", [{}, {"soft_cap": 2.0}, {"window": 6}])
def test_nan_in_foreign_or_stale_slots_reaches_no_output(kernels, dtype, block_size, options):
    batch, num_blocks = random_batch(source(2), [(5, 1), (14, 3), (8, 2)], block_size=block_size)
    own = [
        slot
        for rows in batch.sequences
        for slot in slots_of(rows.block_ids, range(rows.num_context + rows.num_rows), block_size=block_size)
    ]
    spec = LayerKVSpec(num_kv_heads=2, key_dim=32, value_dim=32)
    cache = KVCache([spec], num_blocks=num_blocks, block_size=block_size, dtype=dtype, device=CPU)
    for tensor in (cache.layers[0].key, cache.layers[0].value):
        tensor.fill_(float("nan"))
        tensor[own] = 1.0
    query, key = torch.randn(6, 4, 32).to(dtype), torch.randn(6, 2, 32).to(dtype)
    assert NativeAttention(kernels).begin(batch, cache)(0, query, key, key, scale=1.0, **options).isfinite().all()


# --- invariance: bits ---------------------------------------------------------------------------

LENGTH = 530  # of the text whose attention is compared; two tiles of 256 keys and a bit
FIRST = 220
HEADS = 6, 2
RULES = {"plain": {}, "window": {"window": 37}, "wide window": {"window": 300}, "cap": {"soft_cap": 2.0}}
every_rule = pytest.mark.parametrize("options", RULES.values(), ids=RULES)
every_kind = pytest.mark.parametrize(  # where matrices compute attention, they do with dimensions of whole registers
    ("dtype", "dim"),
    [(torch.float32, 20), (torch.bfloat16, 20), (torch.bfloat16, 96)],
    ids=["fp32", "bf16", "bf16 of whole registers"],
)


class Text:
    """Random queries, keys and values of one text, attended in whatever passes a test likes."""

    def __init__(self, dtype, dim, seed=0):
        random = generator(seed)
        self.rows = [
            torch.randn(LENGTH, heads, dim, generator=random).to(dtype) for heads in (HEADS[0], *HEADS[1:] * 2)
        ]
        self.dtype, self.dim = dtype, dim

    def attend(self, kernels, bounds, *, block_size=16, seed=0, first=0, **options):
        """Outputs of places `first` and up, computed in passes that end at `bounds`; those before are in the cache."""
        (blocks,), num_blocks = deal_blocks(source(seed), [LENGTH], block_size=block_size)
        cache = self.cache(num_blocks, block_size, blocks, first)
        outputs = []
        for start, end in zip([first, *bounds], bounds, strict=False):
            rows = SequenceRows(num_context=start, num_rows=end - start, block_ids=blocks)
            attend = NativeAttention(kernels).begin(make_batch([rows], block_size=block_size), cache)
            outputs.append(attend(0, *(x[start:end] for x in self.rows), scale=0.4, **options))
        return torch.cat(outputs)

    def cache(self, num_blocks, block_size, blocks, length):
        """A cache that holds the first `length` places in `blocks`."""
        spec = LayerKVSpec(num_kv_heads=HEADS[1], key_dim=self.dim, value_dim=self.dim)
        cache = filled_cache([spec], num_blocks=num_blocks, block_size=block_size, dtype=self.dtype)
        slots = slots_of(blocks, range(length), block_size=block_size)
        cache.layers[0].key[slots], cache.layers[0].value[slots] = (x[:length] for x in self.rows[1:])
        return cache


@every_level
@every_kind
@every_rule
def test_chunking_changes_no_bit(kernels, dtype, dim, options):
    text = Text(dtype, dim)
    expected = text.attend(kernels, range(FIRST + 1, LENGTH + 1), first=FIRST, **options)
    for size in (2, 5, 8, 16, 300):
        bounds = [*range(FIRST + size, LENGTH, size), LENGTH]
        assert torch.equal(text.attend(kernels, bounds, first=FIRST, **options), expected), size


@every_level
@every_kind
@every_rule
def test_block_layout_and_size_change_no_bit(kernels, dtype, dim, options):
    text = Text(dtype, dim)
    expected = text.attend(kernels, [LENGTH], first=400, **options)
    for block_size, seed in ((16, 1), (1, 2), (7, 3), (64, 4)):
        found = text.attend(kernels, [LENGTH], first=400, block_size=block_size, seed=seed, **options)
        assert torch.equal(found, expected), block_size


@every_level
@every_kind
@every_rule
@pytest.mark.parametrize("first", [3, 47, 48, 250, 509])
def test_a_path_of_a_tree_has_the_bits_of_the_same_text_as_a_chain(kernels, dtype, dim, options, first):
    text = Text(dtype, dim)
    parents = [-1, 0, 0, 1, 2, 4, 4, 6, 7, 7]
    chain = [0, 2, 4, 6, 7, 9]  # these nodes are places first .. first + 5 of the text
    mask = tree_mask(parents)
    expected = text.attend(kernels, [first + len(chain)], first=first, **options)
    (blocks,), num_blocks = deal_blocks(source(5), [LENGTH], block_size=16)
    rows = SequenceRows(num_context=first, num_rows=len(parents), block_ids=blocks, tree_mask=mask)
    attend = NativeAttention(kernels).begin(
        make_batch([rows], block_size=16), text.cache(num_blocks, 16, blocks, first)
    )
    nodes = [torch.randn(len(parents), *x.shape[1:]).to(dtype) for x in text.rows]
    for mine, theirs in zip(nodes, text.rows, strict=True):
        mine[chain] = theirs[first : first + len(chain)]
    assert torch.equal(attend(0, *nodes, scale=0.4, **options)[chain], expected)


@every_level
@every_kind
@every_rule
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_other_sequences_and_threads_change_no_bit(kernels, dtype, dim, options, num_threads):
    text, other = Text(dtype, dim), Text(dtype, dim, seed=1)
    expected = text.attend(kernels, [300], first=290, **options)
    (own, theirs), num_blocks = deal_blocks(source(6), [LENGTH, LENGTH], block_size=4)
    cache = text.cache(num_blocks, 4, own, 290)
    sequences = [
        SequenceRows(num_context=0, num_rows=33, block_ids=theirs),
        SequenceRows(num_context=290, num_rows=10, block_ids=own),
    ]
    attend = NativeAttention(kernels).begin(make_batch(sequences, block_size=4), cache)
    rows = [torch.cat([b[:33], a[290:300]]) for a, b in zip(text.rows, other.rows, strict=True)]
    with threads(kernels, num_threads):
        assert torch.equal(attend(0, *rows, scale=0.4, **options)[33:], expected)


# --- what is not finite ---------------------------------------------------------------------------


@every_level
@every_kind
@pytest.mark.parametrize("place", [0, 17, 255, 256, 299])
def test_a_key_of_nan_makes_the_rows_that_see_it_nan_and_changes_no_bit_of_the_others(kernels, dtype, dim, place):
    healthy, ill = Text(dtype, dim), Text(dtype, dim)
    ill.rows[1][place, 0, 3] = float("nan")
    found, expected = (text.attend(kernels, [200, 300]) for text in (ill, healthy))
    heads = slice(0, found.shape[1] // ill.rows[1].shape[1])  # those that read the first key head
    assert found[place:, heads].isnan().all()
    found[place:, heads] = expected[place:, heads]
    assert torch.equal(found, expected)


@every_level
@every_kind
@pytest.mark.parametrize("infinity", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", [205, 255, 256, 299])
def test_a_value_that_is_not_finite_changes_no_bit_of_the_rows_before_it(kernels, dtype, dim, place, infinity):
    healthy, ill = Text(dtype, dim), Text(dtype, dim)
    ill.rows[2][place, 0, 3] = infinity
    found, expected = (text.attend(kernels, [200, 300]) for text in (ill, healthy))
    assert torch.equal(found[:place], expected[:place])
    assert not found[place:, 0, 3].isfinite().any()


@every_level
@every_kind
@pytest.mark.parametrize("infinity", [float("nan"), float("-inf")])
@pytest.mark.parametrize("part", [1, 2], ids=["key", "value"])
@pytest.mark.parametrize("place", [0, 163, 255, 256])
def test_what_is_not_finite_changes_no_bit_of_the_rows_whose_window_is_behind_it(
    kernels, dtype, dim, place, part, infinity
):
    healthy, ill = Text(dtype, dim), Text(dtype, dim)
    ill.rows[part][place, 0, 3] = infinity
    found, expected = (text.attend(kernels, [200, 201, 300, 330], window=37) for text in (ill, healthy))
    assert torch.equal(found[:place], expected[:place])
    assert torch.equal(found[place + 37 :], expected[place + 37 :])
    if part == 2:
        assert not found[place : place + 37, 0, 3].isfinite().any()


@every_level
@every_kind
@pytest.mark.parametrize("infinity", [float("nan"), float("inf")])
def test_a_node_whose_window_is_behind_an_ancestor_that_is_not_finite_keeps_its_bits(kernels, dtype, dim, infinity):
    text, window = Text(dtype, dim), 4
    mask = tree_mask([-1, 0, 1, 2, 3, 4, 0])
    (blocks,), num_blocks = deal_blocks(source(5), [LENGTH], block_size=16)
    rows = SequenceRows(num_context=250, num_rows=len(mask), block_ids=blocks, tree_mask=mask)
    found = []
    for root in (text.rows[2][250, 0, 3].item(), infinity):
        nodes = [x[250 : 250 + len(mask)].clone() for x in text.rows]
        nodes[2][0, 0, 3] = root
        attend = NativeAttention(kernels).begin(
            make_batch([rows], block_size=16), text.cache(num_blocks, 16, blocks, 250)
        )
        found.append(attend(0, *nodes, scale=0.4, window=window))
    expected, ill = found
    sees_root = [0, 1, 2, 3, 6]
    assert not ill[sees_root, 0, 3].isfinite().any()
    assert torch.equal(ill[4:6], expected[4:6])


@every_level
def test_scores_that_overflow_below_weigh_nothing_beside_others(kernels):
    """A tile of keys whose scores are all -inf, then one of others: the row is of the others alone."""
    text = Text(torch.float32, 20)
    text.rows[0][:], text.rows[1][:256], text.rows[1][256:] = 1e30, -1e30, 0.0
    found = text.attend(kernels, [300])
    group = found.shape[1] // text.rows[2].shape[1]
    for row, first in ((255, 0), (299, 256)):  # the former sees none but those
        expected = text.rows[2][first : row + 1].mean(0).repeat_interleave(group, 0)
        torch.testing.assert_close(found[row], expected)


@every_level
@every_kind
@pytest.mark.parametrize(("below", "counts"), [(65.0, True), (75.0, False)])
def test_a_key_too_far_below_the_heaviest_counts_as_nothing(kernels, dtype, dim, below, counts):
    """Beyond e^-69, a 1e30th: products with less may be denormal, and slow. Its value of 1e35 is told from nothing."""
    text = Text(dtype, dim)
    query, key, value = text.rows
    query[:], key[:], value[:] = 1.0, 0.0, 0.0
    key[0, :, 0] = -below / 0.4
    value[0] = 1e35
    found = text.attend(kernels, [300])[-1]
    assert (found > 0).all() if counts else (found == 0).all()


# --- sizes ----------------------------------------------------------------------------------------


def one_pass(*, seed=0):
    """A pass of three rows, a cache, and rows for it."""
    batch, num_blocks = random_batch(source(0), [(5, 3)], block_size=4)
    spec = LayerKVSpec(num_kv_heads=2, key_dim=8, value_dim=6)
    cache = filled_cache([spec], num_blocks=num_blocks, block_size=4, dtype=torch.float32, seed=seed)
    random = generator(seed)
    return batch, cache, [torch.randn(3, *shape, generator=random) for shape in ((4, 8), (2, 8), (2, 6))]


@every_level
@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("cut", [lambda x: x[1:], lambda x: x[..., 2:]], ids=["rows", "dimensions"])
def test_rows_that_are_not_those_of_the_pass_and_the_cache_are_refused(kernels, index, cut):
    batch, cache, rows = one_pass()
    rows[index] = cut(rows[index])
    with pytest.raises(ValueError, match=r"query, key, value: got .*takes 3 rows of keys \[2, 8\] and values \[2, 6\]"):
        NativeAttention(kernels).begin(batch, cache)(0, *rows, scale=1.0)


@every_level
def test_query_heads_that_no_key_heads_divide_are_refused(kernels):
    batch, cache, rows = one_pass()
    with pytest.raises(ValueError, match="the query heads are not a multiple of the key heads"):
        NativeAttention(kernels).begin(batch, cache)(0, rows[0][:, :3], *rows[1:], scale=1.0)


# --- several caches -------------------------------------------------------------------------------


@every_level
def test_a_cache_that_nobody_else_holds_is_freed(kernels):
    attention = NativeAttention(kernels)
    batch, cache, rows = one_pass()
    attention.begin(batch, cache)(0, *rows, scale=1.0)
    freed = weakref.ref(cache)
    del cache
    gc.collect()
    assert freed() is None


@every_level
def test_passes_of_several_threads_over_one_attention_use_their_own_caches(kernels):
    attention = NativeAttention(kernels)
    cases = [one_pass(seed=seed) for seed in range(4)]
    expected = [NativeAttention(kernels).begin(batch, cache)(0, *rows, scale=1.0) for batch, cache, rows in cases]

    def attend(turn):
        batch, cache, rows = cases[turn % 4]
        found = attention.begin(batch, cache)(0, *rows, scale=1.0)
        return torch.equal(found, expected[turn % 4])

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(attend, range(400)))
