"""The process that reads prompts: it computes their KV, and hands it over.

It is started by `prefill_process.py` with the descriptor of a socket, on which it is first told what to load. It ends
when the other end of the socket is closed, which the other process's end does, too.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from dataclasses import dataclass
from typing import Any

import forerun
from forerun.core.sampling_params import SamplingParams
from forerun.deploy.disaggregated.channel import Channel, Message
from forerun.engine.kv_transfer import export_kv
from forerun.errors import ForerunError
from forerun.llm import LLM
from forerun.models.fingerprint import fingerprint_of_files

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Reading:
    """A prompt that is being read."""

    token_ids: list[int]
    cache_salt: str | None
    since: float


class PrefillServer:
    """Reads prompts with an engine of its own, and hands the KV of each over as soon as it is there.

    A prompt runs as a request that drafts, so that the drafter reads it too, and ends with its first token: that one is
    thrown away, since the other engine computes it again together with the end of the prompt that fills no block.
    """

    def __init__(self, llm: LLM, channel: Channel) -> None:
        self._llm = llm
        self._llm.engine.parts.processor.files = None  # hidden states are saved where the request is answered
        self._channel = channel
        self._reading: dict[str, _Reading] = {}

    def run(self) -> None:
        """Serve until the other end is closed.

        Raises:
            EOFError: it is.
            OSError: it is.
        """
        engine = self._llm.engine
        while True:
            message = self._channel.receive(0 if engine.has_work else None)
            if message is not None:
                self._handle(message)
            elif engine.has_work:
                self._step()

    def _handle(self, message: Message) -> None:
        header = message.header
        if "cancel" in header:
            self._end(header["cancel"])
            return
        request_id = header["read"]
        if message.error is not None:
            self._give_up(request_id, f"the prompt could not be taken from shared memory ({message.error})")
            return
        token_ids = message.tensors[0].tolist()
        self._reading[request_id] = _Reading(token_ids, header["cache_salt"], time.monotonic())
        room = self._llm.max_model_len - len(token_ids)
        depth = self._llm.speculative.num_speculative_tokens
        sampling = SamplingParams(
            temperature=0, max_tokens=max(1, min(room, depth + 2)), ignore_eos=True, detokenize=False
        )
        try:
            self._llm.engine.add_request(request_id, token_ids, sampling, cache_salt=header["cache_salt"])
        except ForerunError as error:
            self._give_up(request_id, str(error))

    def _step(self) -> None:
        try:
            output = self._llm.engine.step()
        except Exception as error:
            logger.exception("a step of the prefill engine failed; the other engine reads its prompts")
            for request_id in list(self._reading):
                self._give_up(request_id, f"{type(error).__name__}: {error}")
            return
        self._channel.send({})  # whoever waits sees that it goes on
        read = [delta.request_id for delta in output.deltas] + [ended.request_id for ended in output.finished]
        for request_id in dict.fromkeys(read):
            if request_id in self._reading:
                self._hand_over(request_id)

    def _hand_over(self, request_id: str) -> None:
        reading = self._reading[request_id]
        started = time.monotonic()
        kv = export_kv(self._llm.engine.parts, reading.token_ids, reading.cache_salt)
        header = {
            "request": request_id,
            "num_tokens": len(kv.token_ids),
            "block_size": kv.block_size,
            "places": [list(cache.places) for cache in kv.caches],
            "num_tensors": [len(cache.tensors) for cache in kv.caches],
            "read_seconds": started - reading.since,
            "sent": started,
        }
        try:
            self._channel.send(header, [tensor for cache in kv.caches for tensor in cache.tensors])
        except OSError as error:  # no memory; where the other end is closed, this cannot be said either
            self._give_up(request_id, f"its KV could not be put into shared memory ({error})")
        else:
            self._end(request_id)

    def _give_up(self, request_id: str, error: str) -> None:
        self._channel.send({"request": request_id, "error": error})
        self._end(request_id)

    def _end(self, request_id: str) -> None:
        self._reading.pop(request_id, None)
        self._llm.engine.abort(request_id)


def identity_of(llm: LLM) -> dict[str, Any]:
    """What the KV of two engines must agree in, weights and code among it; that of their drafters shows in its shape."""
    return {
        "version": forerun.__version__,
        "weights": None if llm.path is None else fingerprint_of_files(llm.path),
        "dtype": str(llm.dtype),
        "kernels": None if llm.kernels is None else llm.kernels.level,
        "quantization": llm.settings.quantization,
        "row_bits": llm.row_bits,
        "block_size": llm.settings.block_size,
    }


def main(descriptor: int) -> None:
    """Load what the first message names, say so, and serve."""
    channel = Channel.of_descriptor(descriptor)
    try:
        message = channel.receive()
        assert message is not None, "it is waited for"
        spec = message.header
        try:
            if spec["cores"]:
                os.sched_setaffinity(0, spec["cores"])
            llm = LLM(spec["model"], **spec["settings"])
        except (ForerunError, OSError) as error:
            channel.send({"error": str(error)})
            sys.exit(1)
        channel.send({"identity": identity_of(llm)})
        PrefillServer(llm, channel).run()
    except (EOFError, OSError):
        os._exit(0)  # the other process is gone; nobody is left to hear of anything


if __name__ == "__main__":
    main(int(sys.argv[1]))
