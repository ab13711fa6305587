"""On a GPU a row's bits are its own: whatever is computed beside it, as chain or tree, eagerly or in a CUDA graph."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("triton", reason="needs triton: pip install 'forerun[cuda]'")

from forerun.core.random_bits import Stream, key_of, uniform_row  # noqa: E402
from forerun.ops.cuda import noise as noise_by_formula  # noqa: E402
from forerun.ops.cuda import sampling as sampling_by_formula  # noqa: E402
from forerun.ops.cuda.kernels import attention, layers, matmul, noise, sampling, steps  # noqa: E402
from forerun.ops.cuda.table import DevicePlan, DeviceTable, RuleTable, StepRows, Verdicts  # noqa: E402

DEVICE = torch.device("cuda")
COUNTS = [2, 3, 8, 16, 17, 31, 32, 33, 64, 100, 128, 255, 256]
SHAPES = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (49152, 576), (576, 1536), (1000, 72)]


def normal(*shape, seed=0, dtype=torch.bfloat16):
    return torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed), device=DEVICE).to(dtype)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_product_of_one_row_is_that_row_among_2_to_256(shape):
    x, weight = normal(256, shape[1]), normal(*shape, seed=1)
    alone = torch.empty(256, shape[0], device=DEVICE)
    for row in range(256):
        matmul.linear(x[row : row + 1], weight, alone[row : row + 1])
    for count in COUNTS:
        together = torch.empty(count, shape[0], device=DEVICE)
        matmul.linear(x[:count], weight, together)
        assert torch.equal(together, alone[:count]), count


@pytest.mark.parametrize("width", [576, 4096, 8192])
def test_a_norm_of_one_row_is_that_row_among_256(width):
    x, weight = normal(256, width, dtype=torch.float32), normal(width, seed=1)
    together, alone = (torch.empty(256, width, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    layers.rms_norm(x, weight, together, eps=1e-5)
    for row in range(256):
        layers.rms_norm(x[row : row + 1], weight, alone[row : row + 1], eps=1e-5)
    assert torch.equal(together, alone)


class Texts:
    """A cache with texts of 1 to 3000 tokens, and rows that read them."""

    def __init__(self, *, num_heads=32, num_kv_heads=8, dim=128):
        self.lengths = [1, 7, 255, 256, 257, 512, 1000, 2047, 3000]
        self.table = DeviceTable.empty(
            len(self.lengths), max_length=4096, num_blocks=256, most_drafted=8, device=DEVICE
        )
        order = torch.randperm(len(self.lengths) * 256, generator=torch.Generator().manual_seed(0))
        self.table.block_table.copy_(order.view(len(self.lengths), 256))
        num_slots = len(self.lengths) * 4096
        self.keys, self.values = (
            normal(num_slots, num_kv_heads, dim, seed=1),
            normal(num_slots, num_kv_heads, dim, seed=2),
        )
        self.num_heads, self.dim = num_heads, dim

    def kv_slots(self, slot, places):
        return self.table.block_table[slot, places // 16].long() * 16 + places % 16

    def attend(self, rows, query, **options):
        output = torch.empty_like(query)
        options = {"block_size": 16, "scale": self.dim**-0.5, **options}
        attention.attend(query, self.keys, self.values, output, rows, self.table.block_table, **options)
        return output

    def rows(self, places):
        """Linear rows at (slot, position)."""
        rows = StepRows.empty(len(places), 1, longest_path=8, device=DEVICE)
        rows.slots.copy_(ints(*(slot for slot, _ in places)))
        rows.positions.copy_(ints(*(position for _, position in places)))
        rows.num_linear.copy_(rows.positions + 1)
        return rows


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "dim"), [(32, 8, 128), (9, 3, 64)])
@pytest.mark.parametrize("options", [{}, {"window": 300}, {"soft_cap": 30.0}])
def test_attention_of_one_row_is_that_row_among_others(num_heads, num_kv_heads, dim, options):
    texts = Texts(num_heads=num_heads, num_kv_heads=num_kv_heads, dim=dim)
    places = [(slot, place) for slot, n in enumerate(texts.lengths) for place in range(max(0, n - 28), n)][:256]
    query = normal(len(places), num_heads, dim, seed=3)
    together = texts.attend(texts.rows(places), query, **options)
    for row, place in enumerate(places):
        alone = texts.attend(texts.rows([place]), query[row : row + 1], **options)
        assert torch.equal(alone[0], together[row]), place


@pytest.mark.parametrize("start", [3, 250, 1020])
def test_a_node_of_a_tree_has_the_bits_of_its_path_as_a_chain(start):
    """Nodes 0 to 7 lie behind place `start`; node 7's path is 1, 4, 7."""
    texts = Texts()
    table, slot, path = texts.table, 8, [1, 4, 7]
    table.computed[slot], table.lengths[slot] = start, start + 1
    table.draft_parents[slot], table.draft_sizes[slot] = ints(-1, -1, 0, 0, 1, 2, 3, 4), 8
    plan = DevicePlan(slots=ints(slot), tails=ints(1), most_drafted=ints(8), ends=ints(1))
    rows = StepRows.empty(9, 1, longest_path=8, device=DEVICE)
    steps.prepare(plan, table, rows, block_size=16)
    query = normal(9, texts.num_heads, texts.dim, seed=3)
    as_tree = texts.attend(rows, query)
    sources = rows.kv_slots[[1 + node for node in path]]
    destinations = texts.kv_slots(slot, torch.arange(start + 1, start + 4, device=DEVICE))
    texts.keys[destinations], texts.values[destinations] = texts.keys[sources], texts.values[sources]
    as_chain = texts.attend(texts.rows([(slot, start + i) for i in range(4)]), query[[0, 2, 5, 8]])
    assert torch.equal(as_chain, as_tree[[0, 2, 5, 8]])


def test_noise_is_the_hosts():
    seeds, positions = torch.tensor([0, 1, 2**62, -1], device=DEVICE), ints(0, 5, 1000, 2**31 - 1)
    keys = [key_of(s % 2**64, p, Stream.TARGET, 0) for s, p in zip(seeds.tolist(), positions.tolist(), strict=True)]
    found = noise.row_keys(seeds, positions)
    assert [key % 2**64 for key in found.tolist()] == keys
    uniform = torch.empty(4, 50_000, dtype=torch.float64, device=DEVICE)
    noise.uniform_rows(found, uniform)
    for row, key in enumerate(keys):
        assert (uniform[row].cpu().numpy() == uniform_row(key, 50_000)).all()
    assert torch.equal(noise_by_formula.row_keys(seeds, positions), found)


def test_ten_thousand_tokens_are_the_hosts():
    """Every rule, on the host by formula and on the device; also the logarithm's last bit decides alike."""
    num_rows, vocab_size = 250, 2000
    rules, rows = (
        RuleTable.empty(num_rows, vocab_size, device=DEVICE),
        StepRows.empty(num_rows, 1, longest_path=1, device=DEVICE),
    )
    rows.slots.copy_(torch.arange(num_rows))
    slots = torch.arange(num_rows, device=DEVICE)
    rules.seeds.copy_(slots * 7919)
    rules.temperature.copy_(torch.where(slots % 5 == 0, 0.0, 0.5 + slots % 7 / 5))
    rules.top_k.copy_(torch.where(slots % 3 == 0, 50, 0))
    rules.top_p.copy_(torch.where(slots % 2 == 0, 0.9, 1.0))
    host = RuleTable(**{name: getattr(rules, name).cpu() for name in RuleTable.__dataclass_fields__})
    for step in range(40):
        rows.positions.fill_(step)
        logits = 4 * normal(num_rows, vocab_size, seed=step, dtype=torch.float32)
        token_ids, largest = (
            torch.empty(num_rows, dtype=torch.int32, device=DEVICE),
            torch.empty(num_rows, device=DEVICE),
        )
        sampling.sample(logits, rows, rules, token_ids, largest)
        expected, host_largest = torch.empty(num_rows, dtype=torch.int32), torch.empty(num_rows)
        host_rows = StepRows(**{name: getattr(rows, name).cpu() for name in StepRows.__dataclass_fields__})
        sampling_by_formula.sample(logits.cpu(), host_rows, host, expected, host_largest)
        assert torch.equal(token_ids.cpu(), expected)


def test_a_step_in_a_cuda_graph_writes_what_it_writes_eagerly():
    texts = Texts()
    table, vocab_size, num_rows = texts.table, 5000, 16
    lengths = [length - 1 if length > 1 else 1 for length in texts.lengths[:4]]
    start = DeviceTable(**{name: getattr(table, name).clone() for name in DeviceTable.__dataclass_fields__})
    start.lengths[:4], start.computed[:4] = ints(*lengths) + 1, ints(*lengths)
    start.draft_sizes[:4], start.draft_parents[:4, :3] = 3, ints(-1, 0, 0)
    rules = RuleTable.empty(len(texts.lengths), vocab_size, device=DEVICE)
    rules.temperature[1::2] = 1.0
    plan = DevicePlan(
        slots=ints(0, 1, 2, 3), tails=ints(1, 1, 1, 1), most_drafted=ints(3, 2, 0, 3), ends=ints(1, 1, 1, 1)
    )
    embedding, head = normal(vocab_size, 4096, seed=4), normal(vocab_size, 4096, seed=5)
    rows, verdicts = StepRows.empty(num_rows, 4, longest_path=8, device=DEVICE), Verdicts.empty(4, 8, device=DEVICE)
    hidden = torch.empty(num_rows, 4096, device=DEVICE)
    normed = torch.empty(num_rows, 4096, device=DEVICE, dtype=torch.bfloat16)
    attended, logits = torch.empty_like(normed), torch.empty(num_rows, vocab_size, device=DEVICE)
    sampled, largest = (
        torch.full((num_rows,), -1, dtype=torch.int32, device=DEVICE),
        torch.zeros(num_rows, device=DEVICE),
    )
    weight = torch.ones(4096, device=DEVICE)

    def step():
        steps.prepare(plan, table, rows, block_size=16)
        layers.embed(rows.tokens, embedding, hidden)
        layers.rms_norm(hidden, weight, normed, eps=1e-5)
        attention.attend(
            *(normed.view(num_rows, 32, 128), texts.keys, texts.values, attended.view(num_rows, 32, 128), rows),
            table.block_table,
            block_size=16,
            scale=1.0,
        )
        matmul.linear(attended, head, logits)
        sampling.sample(logits, rows, rules, sampled, largest)
        steps.match(plan, table, rows, sampled, verdicts)
        steps.move(plan, rows, verdicts, texts.keys[None])
        steps.commit(plan, table, rules, verdicts)

    def rewind():
        for name in DeviceTable.__dataclass_fields__:
            getattr(table, name).copy_(getattr(start, name))

    keys = texts.keys.clone()
    results = []
    graph = torch.cuda.CUDAGraph()
    rewind()
    step()  # compiles
    for run in ("eager", "graph"):
        rewind()
        texts.keys.copy_(keys)
        if run == "graph":
            with torch.cuda.graph(graph):
                step()
            rewind()
            graph.replay()
        else:
            step()
        results.append([*(getattr(table, name).clone() for name in DeviceTable.__dataclass_fields__), sampled.clone()])
    assert all(map(torch.equal, *results))
