"""What a step on an NVIDIA GPU computes, twice: by formula in torch here, and as Triton kernels in `kernels`.

A module of `kernels` has the functions of the module beside this file with the same name: same arguments, same outputs. The
torch functions run on any device; they are the oracle of the kernels' tests, and let the device's step run where there is no
GPU. Only `kernels` imports triton. Every function writes into tensors that the caller owns, so that a CUDA graph can hold
it, and gives the host nothing back.
"""
