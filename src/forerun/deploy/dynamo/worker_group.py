"""Workers between which a stream may move must write the same texts: what those that run have in common."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TextIO

import torch

import forerun
from forerun.bench.machine import describe_arithmetic, kernel_table
from forerun.errors import ConfigError
from forerun.llm import LLM
from forerun.models.fingerprint import fingerprint_of_files
from forerun.ops.cuda.system import InstalledCuda
from forerun.verify.matching import MatchingConfig


class WorkerGroup:
    """The workers of one address, on machines that share a folder.

    Each holds a lock on the group's file while it runs, however it ends. Whoever is alone writes its configuration
    there, and others must have the same.
    """

    def __init__(self, folder: Path, address: str) -> None:
        self._folder = folder
        self._address = address
        self._file: TextIO | None = None

    def join(self, configuration: Mapping[str, str]) -> None:
        """Become one of the group, until `leave` or the end of the process.

        Raises:
            ConfigError: a worker that runs would write other texts, or the folder cannot be written.
        """
        import fcntl  # Dynamo runs on Linux only

        path = self._folder / f"{hashlib.sha256(self._address.encode()).hexdigest()[:16]}.json"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+", encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"--workers-folder: cannot write {path} ({error.strerror}); give a folder that this worker may write"
            ) from None
        with suppress(BlockingIOError):  # others run
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._file.truncate(0)
            self._file.write(json.dumps(dict(configuration)))
            self._file.flush()
        fcntl.flock(self._file, fcntl.LOCK_SH)
        self._file.seek(0)
        theirs = json.loads(self._file.read())
        for name, mine in configuration.items():
            if theirs.get(name) != mine:
                self.leave()
                raise ConfigError(
                    f"dynamo-worker: workers of {self._address} run with {name} {theirs.get(name)}, this one has {mine}: a "
                    "stream that moves between them would change its text; start it as the others, or under another --component"
                )

    def leave(self) -> None:
        """Be none of the group any more; doing so again changes nothing."""
        if self._file is not None:
            self._file.close()
            self._file = None


def text_configuration(llm: LLM) -> dict[str, str]:
    """All that decides about a request's text besides the request."""
    speculative, is_native = llm.speculative, llm.kernels is not None
    return {
        "version": forerun.__version__,
        "model": "made in memory" if llm.path is None else fingerprint_of_files(llm.path)[:16],
        "dtype": str(llm.dtype).removeprefix("torch."),
        "quantization": str(llm.settings.quantization).lower(),
        "device": torch.cuda.get_device_name(llm.device) if llm.device.type == "cuda" else llm.device.type,
        "kernels": describe_arithmetic(llm),
        "kernel_table": _tiles(llm),
        "is_batch_invariant": str(llm.is_batch_invariant),
        # the native kernels are not torch's, and give the same bits in any number of processes
        "torch": "any" if is_native else torch.__version__,
        "tensor_parallel_size": "any" if is_native else str(llm.settings.tensor_parallel_size),
        "max_model_len": str(llm.max_model_len),
        "seed": str(llm.settings.seed),
        "sampling_defaults": llm.sampling_defaults.describe() or "none",
        # the matching verifier's texts do not depend on drafts
        "verifier": "matching" if isinstance(speculative.verifier, MatchingConfig) else speculative.describe(),
    }


def _tiles(llm: LLM) -> str:
    """What says how a GPU's kernels cut their products, and so in which order they sum."""
    if llm.device.type != "cuda" or not llm.has_device_layers:
        return "none"
    table = kernel_table(llm.device, llm.settings.kernel_table)
    return f"{'none' if table is None else table}, triton {InstalledCuda().triton}"
