"""Tensor parallelism on CPUs: each process computes some outputs of each product, and all read them from shared memory."""
