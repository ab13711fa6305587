"""The device's part of a step in CUDA graphs, one for each of a few numbers of rows: one launch instead of hundreds."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol
from weakref import WeakSet

import torch
from torch import Tensor
from tqdm import tqdm

from forerun.errors import DeviceLostError, one_line
from forerun.executor.device_computation import PLAN_FIELDS, StepOutputs, StepTensors
from forerun.executor.host_copies import to_device
from forerun.executor.row_masks import RowMasks
from forerun.models.base import TargetModel
from forerun.ops.cuda.failures import device_failure
from forerun.ops.cuda.table import StepRows, Verdicts

logger = logging.getLogger(__name__)


BYTES_PER_LAYER = 64 << 10  # of a graph, for the launches of a layer; a guess until a GPU has shown what they take
BYTES_PER_GRAPH = 8 << 20  # likewise for what it takes at all
KINDS = 2  # of steps of a size: the usual ones, and those that are recorded when they come up


def launch_bytes(model: TargetModel, sizes: Sequence[int]) -> int:
    """Memory that the launches of CUDA graphs of these numbers of rows take, estimated; the tensors of the largest are all that they work on."""
    return KINDS * len(sizes) * (BYTES_PER_GRAPH + model.num_layers * BYTES_PER_LAYER)


class Recorder(Protocol):
    """Records what a function has a device do, and has it do the same again."""

    def record(self, function: Callable[[], StepOutputs]) -> Recorded:
        """Call a function, whose outputs are written to the same places by every replay."""
        ...


class Recorded(NamedTuple):
    """What was recorded: where the outputs lie, and how they are computed again from what the inputs hold then."""

    outputs: StepOutputs
    replay: Callable[[], None]


class CudaRecorder:
    """Records CUDA graphs, which share one pool of memory: what one of them leaves there is void when another one runs.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # One stream for all, of this GPU: torch keeps a workspace of cuBLAS for each, and its own is that of whichever GPU came first.
        self._beside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()
        self._invalid: list[torch.cuda.CUDAGraph] = []

    def record(self, function: Callable[[], StepOutputs]) -> Recorded:
        """See `Recorder`; the function is called once before, so that its kernels are compiled."""
        # torch takes no graph into the pool of others that are gone while a tensor of theirs is not
        if not self._graphs:
            self._pool = torch.cuda.graph_pool_handle()
        usual, beside = torch.cuda.current_stream(), self._beside
        beside.wait_stream(usual)
        with torch.cuda.stream(beside):
            function()
        usual.wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        # What other threads of a server ask of CUDA meanwhile does not end the recording.
        recording = torch.cuda.graph(graph, pool=self._pool, stream=beside, capture_error_mode="thread_local")
        try:
            # the outer one goes back to the usual stream where the inner one cannot, as the driver does not end the recording
            with torch.cuda.stream(usual), recording:
                outputs = function()
        except Exception as error:
            if self._was_left(graph) and isinstance(error.__context__, Exception):
                raise error.__context__ from None  # what made it invalid; its end only says that it was
            raise
        self._graphs.add(graph)
        return Recorded(outputs, graph.replay)

    def _was_left(self, graph: torch.cuda.CUDAGraph) -> bool:
        """Whether torch's allocator still took a failed recording for one under way; it does no longer, so that others can be made.

        Where memory was short torch has ended it. Where the driver has found it invalid, torch never comes to that: the
        allocator would refuse the next one, and to give memory back. Its part for pinned memory still asks the graph, and names
        the pool: both are put aside, and so is the stream.
        """
        try:
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)
        except RuntimeError:
            return False
        self._invalid.append(graph)
        self._pool = torch.cuda.graph_pool_handle()
        self._beside = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        return True


class StepBuffers:
    """The tensors of all recorded steps, as long as the largest needs them; smaller ones use their beginnings.

    Args:
        most_rows: T of the largest step.
        most_sequences: N of the largest.
        most_drafted: nodes of the largest draft.
        vocab_size: width of the logits.
        device: where they lie.
    """

    def __init__(
        self, most_rows: int, most_sequences: int, *, most_drafted: int, vocab_size: int, device: torch.device
    ) -> None:
        self._most_sequences = most_sequences
        self._device = device
        # so that each field begins at sixteen bytes, as in steps that are not recorded
        width = -(-most_sequences // 4) * 4
        self._plan = torch.zeros((PLAN_FIELDS, width), dtype=torch.int32, device=device)
        self._rows = StepRows.empty(most_rows, most_sequences, longest_path=most_drafted, device=device)
        self._verdicts = Verdicts.empty(most_sequences, most_drafted, device=device)
        self._masks = torch.zeros((most_rows, -(-vocab_size // 32)), dtype=torch.int32, device=device)
        self._has_mask = torch.zeros(most_rows, dtype=torch.int32, device=device)
        self.clear()

    def clear(self) -> None:
        """Plan a step of no sequences."""
        self._plan.fill_(-1)

    def of_size(self, num_rows: int, *, is_masked: bool) -> StepTensors:
        """The tensors of a step of so many rows, whatever the plan says of them."""
        num_sequences, rows, verdicts = min(num_rows, self._most_sequences), self._rows, self._verdicts
        of_rows = {
            name: getattr(rows, name)[:num_rows]
            for name in StepRows.__dataclass_fields__
            if name not in ("first_rows", "first_judged")
        }
        firsts = {name: getattr(rows, name)[: num_sequences + 1] for name in ("first_rows", "first_judged")}
        return StepTensors.of_plan(
            self._plan[:, :num_sequences],
            rows=StepRows(**of_rows, **firsts),
            verdicts=Verdicts(
                **{name: getattr(verdicts, name)[:num_sequences] for name in Verdicts.__dataclass_fields__}
            ),
            masks=self._masks[:num_rows] if is_masked else None,
            has_mask=self._has_mask[:num_rows] if is_masked else None,
        )

    def write(self, plan: Tensor, masks: RowMasks | None) -> None:
        """Write a plan, [PLAN_FIELDS, n], and send the masks of its judged rows."""
        self.clear()
        self._plan[:, : plan.shape[1]] = plan
        if masks is not None:
            num_judged = len(masks.masks)
            self._masks[:num_judged] = to_device(masks.masks, self._device)
            self._has_mask[:num_judged] = to_device(masks.has_mask, self._device)


@dataclass(frozen=True, slots=True)
class _Variant:
    """What else than the plan a recorded step depends on."""

    num_rows: int
    is_masked: bool = False
    has_trees: bool = False
    drafts: bool = False  # on the device


class StepGraphs:
    """Steps of up to a number of rows, recorded once for each of a few sizes; rows are padded up to the next.

    The usual ones are recorded by `prepare`, those with masks of grammars, and those in which the device does not draft though it
    can, when they first come up. A size whose usual step cannot be recorded, for want of memory or because of what it does, is
    left out from then on: rows are padded up to the next one that was, or run eagerly where there is none. Where a step of another
    kind cannot be, those of its size and kind are eager. Each is said once.

    Args:
        run: computes a step from its tensors; whether there are trees, and whether the device drafts.
        buffers: of the largest size.
        sizes: numbers of rows, rising.
        recorder: makes the graphs.
        has_trees: whether drafts may be trees.
    """

    def __init__(
        self,
        run: Callable[[StepTensors, bool, bool], StepOutputs],
        buffers: StepBuffers,
        sizes: Sequence[int],
        recorder: Recorder,
        *,
        has_trees: bool,
    ) -> None:
        self._run = run
        self._buffers = buffers
        self._sizes = sizes
        self._recorder = recorder
        self._recorded: dict[_Variant, Recorded | None] = {}  # None: it cannot be recorded
        self._has_trees = has_trees  # and of all steps from the first on, so that few are recorded
        self._why = ""  # the step that failed last could not be recorded
        self._has_warned = False  # of steps that are not the usual ones

    @property
    def most_rows(self) -> int | None:
        """Rows of the largest step that a graph holds; None where no usual step could be recorded."""
        return self._sizes[-1] if self._sizes else None

    @property
    def num_recorded(self) -> int:
        """Graphs that there are."""
        return sum(recorded is not None for recorded in self._recorded.values())

    def prepare(self, *, drafts: bool, shows_progress: bool = False) -> None:
        """Record the usual step of each size, the largest first, so that the others find its memory."""
        failed: list[int] = []
        reason = ""
        with tqdm(self._sizes[::-1], desc="Recording CUDA graphs", disable=not shows_progress) as sizes:
            for num_rows in sizes:
                if self._graph_of(_Variant(num_rows, has_trees=self._has_trees, drafts=drafts)) is None:
                    reason = reason or self._why
                    failed.append(num_rows)
        if failed:
            self._sizes = [size for size in self._sizes if size not in failed]
            padded = " are padded to a larger size or" if self._sizes else ""
            _warn(
                f"steps of {', '.join(map(str, failed[::-1]))} rows could not be recorded ({reason}); they{padded} run eagerly"
            )

    def forget(self) -> None:
        """Record all steps again, since what computes them has changed."""
        self._recorded.clear()

    def ready(
        self, plan: Tensor, masks: RowMasks | None, *, num_rows: int, has_trees: bool, drafts: bool
    ) -> Recorded | None:
        """Write a step of at most `num_rows` rows to the buffers of the smallest graph that has room for it; None where none has.

        Args:
            plan: [PLAN_FIELDS, N] on the device, see `plan_values`.
            masks: of the judged rows, in order.
            num_rows: of all sequences together.
            has_trees: whether a draft may be a tree.
            drafts: whether the device drafts for a sequence.
        """
        at = bisect_left(self._sizes, max(num_rows, plan.shape[1]))
        if at == len(self._sizes):
            return None
        self._has_trees |= has_trees
        recorded = self._graph_of(_Variant(self._sizes[at], masks is not None, self._has_trees, drafts))
        if recorded is not None:
            self._buffers.write(plan, masks)
        elif not self._has_warned:
            self._has_warned = True
            _warn(
                f"a step of {self._sizes[at]} rows could not be recorded ({self._why}); such steps run eagerly from now on"
            )
        return recorded

    def _graph_of(self, variant: _Variant) -> Recorded | None:
        """The graph of such steps, recorded now if it was not before; None where that has failed."""
        if variant not in self._recorded:
            self._recorded[variant] = self._record(variant)
        return self._recorded[variant]

    def _record(self, variant: _Variant) -> Recorded | None:
        """Record a step of no sequences: what it computes depends on the plan that the buffers hold when it is replayed."""
        step = self._buffers.of_size(variant.num_rows, is_masked=variant.is_masked)
        self._buffers.clear()

        def function() -> StepOutputs:
            outputs = self._run(step, variant.has_trees, variant.drafts)
            return replace(outputs, logits=None)  # whose memory others may have

        try:
            return self._recorder.record(function)
        except Exception as error:  # torch's, triton's, a driver's
            if isinstance(device_failure(error), DeviceLostError):
                raise
            self._why = one_line(error)
            return None


def _warn(what: str) -> None:
    logger.warning(
        "CUDA graphs: %s, with the same texts; set enforce_eager=True to be rid of this, or lower gpu_memory_utilization",
        what,
    )
