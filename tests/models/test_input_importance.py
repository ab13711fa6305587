"""What the inputs of a decoder's products count."""

from dataclasses import replace

import torch

from forerun.models.input_importance import NUM_TOKENS, SEED, InputImportance, attend_to_past
from forerun.models.loader import load_model
from tests.native import generator
from tests.tiny_models import save_tiny_model


class CountingProduct:
    """Notes the mean square of what a product reads."""

    def __init__(self, product):
        self.product = product
        self.mean_square = None

    def __call__(self, x):
        self.mean_square = x.square().mean(0)
        return self.product(x)


def test_it_is_the_mean_square_of_what_each_product_reads_in_a_whole_pass(tmp_path):
    folder = save_tiny_model(tmp_path, "Gemma3ForCausalLM")
    model = load_model(folder, dtype=torch.float32, device=torch.device("cpu"))
    layers = model.layers.layers
    importance = InputImportance(model.embed, model.vocab_size, model.rotations, model.layers.rotation_of)
    found = [importance.measure(layer) for layer in layers]
    products = []
    for layer in layers:
        owners = {"qkv": layer.attention, "output": layer.attention, "gate_up": layer.mlp, "down": layer.mlp}
        products.append({name: CountingProduct(getattr(owner, name)) for name, owner in owners.items()})
        for name, owner in owners.items():
            object.__setattr__(owner, name, products[-1][name])
    tokens = torch.randint(model.vocab_size, (NUM_TOKENS,), generator=torch.Generator().manual_seed(SEED))
    rotations = model.rotations(torch.arange(NUM_TOKENS))
    model.layers(model.embed(tokens), rotations, attend_to_past, 0, model.num_layers)
    for measured, expected in zip(found, products, strict=True):
        for name, product in expected.items():
            assert torch.equal(getattr(measured, name), product.mean_square), name


def test_all_experts_read_what_the_router_reads(tmp_path):
    folder = save_tiny_model(tmp_path, "Qwen3MoeForCausalLM")
    model = load_model(folder, dtype=torch.float32, device=torch.device("cpu"))
    layer = model.layers.layers[0]
    importance = InputImportance(model.embed, model.vocab_size, model.rotations, model.layers.rotation_of)
    router = CountingProduct(layer.mlp.router)
    counted = replace(layer, mlp=replace(layer.mlp, router=router))
    assert importance.measure(counted).gate_up.equal(router.mean_square)
    assert importance.measure(layer).down is None


def test_attention_to_the_past_is_the_textbooks():
    random = generator(0)
    query, key, value = (torch.randn(9, heads, 8, generator=random) for heads in (4, 2, 2))
    for window, soft_cap in ((None, None), (3, None), (None, 2.0)):
        found = attend_to_past(0, query, key, value, scale=0.3, window=window, soft_cap=soft_cap)
        for head in range(4):
            for row in range(9):
                first = 0 if window is None else max(0, row - window + 1)
                scores = key[first : row + 1, head // 2] @ query[row, head] * 0.3
                scores = scores if soft_cap is None else soft_cap * torch.tanh(scores / soft_cap)
                expected = scores.softmax(0) @ value[first : row + 1, head // 2]
                torch.testing.assert_close(found[row, head], expected)
