"""Tiny quantized checkpoints, written value by value; what they mean is said here in plain arithmetic."""

import numpy as np
import torch

OUTPUTS, INPUTS = 32, 192


def random_groups(
    seed, *, group_size, bits=4, outputs=OUTPUTS, inputs=INPUTS, symmetric=False, group_of=lambda i, size: i // size
):
    """Codes [outputs, inputs] from 0, zeros [outputs, groups], and fp16 scales; with their values in float64.

    `group_of(i, group_size)` is the group of input i.
    """
    random = np.random.default_rng(seed)
    groups = inputs // group_size
    codes = random.integers(0, 1 << bits, (outputs, inputs))
    zeros = np.full((outputs, groups), 1 << bits - 1)
    if not symmetric:
        zeros = random.integers(0, 1 << bits, (outputs, groups))
    scales = random.uniform(0.001, 0.1, (outputs, groups)).astype(np.float16)
    values = np.empty((outputs, inputs))
    for output in range(outputs):
        for i in range(inputs):
            group = group_of(i, group_size)
            values[output, i] = float(scales[output, group]) * (int(codes[output, i]) - int(zeros[output, group]))
    return codes, zeros, scales, values


def words(codes, bits, order=None):
    """Codes [n, m] in words of 32 bits along the second axis; place i of a word holds code order[i]."""
    per_word = 32 // bits
    rows, columns = codes.shape
    padded = np.zeros((rows, -(-columns // per_word) * per_word), dtype=np.uint64)
    padded[:, :columns] = codes
    packed = np.zeros((rows, padded.shape[1] // per_word), dtype=np.uint64)
    for place in range(per_word):
        source = place if order is None else order[place]
        packed |= padded[:, source::per_word] << np.uint64(bits * place)
    return torch.from_numpy(packed.astype(np.uint32).view(np.int32).copy())


def in_order_of_activations(seed, *, group_size, inputs=INPUTS):
    """The group of each input where act-order has put together inputs from anywhere: [inputs]."""
    return np.random.default_rng(seed).permutation(np.arange(inputs) // group_size)


def gptq_parts(codes, zeros, scales, *, bits=4, group_size, version=1):
    """The tensors of a module as AutoGPTQ writes them."""
    stored = (zeros - (1 if version == 1 else 0)) % (1 << bits)
    return {
        "qweight": words(codes, bits).T.contiguous(),
        "qzeros": words(stored.T, bits),
        "scales": torch.from_numpy(scales.T.copy()),
        "g_idx": torch.arange(codes.shape[1], dtype=torch.int32) // group_size,
    }


AWQ_PLACES = (0, 2, 4, 6, 1, 3, 5, 7)  # which of eight outputs lies at each place of a word


def awq_parts(codes, zeros, scales):
    """The tensors of a module as AutoAWQ writes them."""
    return {
        "qweight": words(codes.T, 4, AWQ_PLACES),
        "qzeros": words(zeros.T, 4, AWQ_PLACES),
        "scales": torch.from_numpy(scales.T.copy()),
    }


def compressed_parts(codes, zeros, scales, *, bits=4, symmetric=True):
    """The tensors of a module as compressed-tensors writes them in its format "pack-quantized"."""
    parts = {
        "weight_packed": words(codes, bits),
        "weight_scale": torch.from_numpy(scales.copy()),
        "weight_shape": torch.tensor(codes.shape),
    }
    if not symmetric:
        parts["weight_zero_point"] = words(zeros.T, bits).T.contiguous()
    return parts


def compressed_settings(*, bits=4, symmetric=True, strategy="group", group_size=32, **others):
    """A `quantization_config` of compressed-tensors."""
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": strategy, "group_size": group_size}
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    settings = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": scheme}}
    return settings | others
