"""What torch's, triton's and CUDA's errors are taken for."""

from __future__ import annotations

import pytest
import torch

from forerun.errors import DeviceLostError, StepError
from forerun.ops.cuda.failures import device_failure

OUT_OF_MEMORY = [
    torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.1 GiB of which"
    ),
    RuntimeError("CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions."),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
]
LOST = [
    torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be"),
    RuntimeError("CUDA error: device-side assert triggered"),
    RuntimeError("CUDA error: uncorrectable ECC error encountered"),
    RuntimeError("CUDA error: unspecified launch failure"),
    RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
    RuntimeError("cudaErrorDevicesUnavailable: all CUDA-capable devices are busy or unavailable"),
]
NEITHER = [
    RuntimeError("mat1 and mat2 shapes cannot be multiplied (3x4 and 5x6)"),
    RuntimeError("CUDA error: invalid configuration argument"),
    RuntimeError("CUDA error: no kernel image is available for execution on the device"),
    RuntimeError("CUDA error: operation not permitted when stream is capturing"),
    RuntimeError("CUDA error: operation failed due to a previous error during capture"),
    RuntimeError("CUDA error: dependency created on uncaptured work in another stream"),
    RuntimeError("CUDA error: operation would make the legacy stream depend on a capturing blocking stream"),
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
    ValueError("CUDA error: an illegal memory access was encountered"),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=str)
def test_memory_that_did_not_suffice_is_no_loss(error):
    failure = device_failure(error)
    assert isinstance(failure, StepError)
    assert "lower gpu_memory_utilization, max_num_batched_tokens or max_num_seqs" in str(failure)


def test_the_amount_that_was_asked_for_is_said():
    assert "(2.50 GiB more were asked for)" in str(device_failure(OUT_OF_MEMORY[0]))


@pytest.mark.parametrize("error", LOST, ids=str)
def test_a_device_after_which_nothing_computes_is_lost(error):
    failure = device_failure(error)
    assert isinstance(failure, DeviceLostError)
    assert str(error).splitlines()[0] in str(failure)


@pytest.mark.parametrize("error", NEITHER, ids=str)
def test_other_errors_are_left_as_they_are(error):
    assert device_failure(error) is None
