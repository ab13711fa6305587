"""What a device's errors mean: memory that one step lacked, or a device that computes no more."""

from __future__ import annotations

import re

import torch

from forerun.errors import DeviceLostError, ForerunError, StepError, one_line

OUT_OF_MEMORY = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")

HARMLESS = (
    *("invalid argument", "invalid configuration", "no kernel image", "invalid device function", "not supported"),
    *("stream is capturing", "a capturing", "StreamCapture", "during capture", "capture was not initiated"),
    *("uncaptured work", "capture sequence", "CUBLAS_STATUS_NOT_INITIALIZED"),
)
"""Errors of CUDA that leave the device as it was: the call was wrong, or cannot be recorded, and the next may be right."""

LOST = re.compile(
    r"\bCUDA (driver )?error\b|\bTriton Error \[CUDA\]|cudaError[A-Z]|illegal memory access|device-side assert"
    r"|unspecified launch failure|misaligned address|uncorrectable|\bECC\b|CUBLAS_STATUS_EXECUTION_FAILED"
)


def device_failure(error: BaseException) -> ForerunError | None:
    """What an exception of torch, triton or CUDA says of the device; None where it says nothing.

    After an illegal access, a failed assertion or an error of the memory every later call fails too, whatever it asks: CUDA
    gives the process no way back.
    """
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError) or (isinstance(error, RuntimeError) and _names(text, OUT_OF_MEMORY)):
        asked = re.search(r"Tried to allocate ([\d.]+ \w+)", text)
        amount = f" ({asked[1]} more were asked for)" if asked else ""
        return StepError(
            f"device memory: a step did not fit{amount}; lower gpu_memory_utilization, max_num_batched_tokens or max_num_seqs"
        )
    if isinstance(error, RuntimeError) and LOST.search(text) and not _names(text, HARMLESS):
        return DeviceLostError(
            f"device: it computes no more ({one_line(error)}); start again, and if it comes back look at nvidia-smi and dmesg, "
            "and run with CUDA_LAUNCH_BLOCKING=1 to see where"
        )
    return None


def _names(text: str, phrases: tuple[str, ...]) -> bool:
    return any(phrase in text for phrase in phrases)
