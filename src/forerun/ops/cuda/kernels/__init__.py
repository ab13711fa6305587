"""Triton kernels of a step on an NVIDIA GPU; importing this package imports triton (extra `cuda`)."""
