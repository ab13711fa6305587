"""Puts an engine together: from settings, or from a model that is loaded already."""

from __future__ import annotations

import gc
import logging
import random
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from forerun.config.cost_profile import CostProfile
from forerun.config.gpu_memory import (
    DeviceMemory,
    MeasuredSteps,
    MemoryShare,
    check_share,
    check_weights,
    loading,
    measure_share,
    memory_of,
    used_bytes,
)
from forerun.config.kernel_table import use_kernel_table
from forerun.config.kv_memory import KVBudget, feature_widths, plan_kv
from forerun.config.settings import EngineSettings
from forerun.config.speculative_config import (
    MAX_SPECULATIVE_TOKENS,
    SpeculativeConfig,
    merge_deprecated,
    resolve_speculative,
)
from forerun.core.cache_folder import cache_folder
from forerun.core.cpu_name import describe_processor
from forerun.core.stats import ExecutorInfo
from forerun.drafters.base import Drafter, KeepsKV, KeepsPools, LooksUpNgrams, TargetInfo
from forerun.drafters.guard import GuardedDrafter
from forerun.drafters.pool_files import ModelIdentity
from forerun.drafters.pool_folder import PoolFolder
from forerun.engine.engine import Engine, EngineParts
from forerun.engine.request import RequestProcessor
from forerun.engine.scheduler import Scheduler, SchedulerLimits
from forerun.errors import ConfigError
from forerun.executor.device_choice import steps_on_device, with_layers_on_device
from forerun.executor.hidden_states import HiddenStatesExporter
from forerun.executor.host_copies import as_current
from forerun.executor.largest_step import LargestStep, MeasuredDrafter
from forerun.executor.layer_check import layers_differ
from forerun.executor.local import LocalExecutor
from forerun.grammar.cache import GrammarCache
from forerun.kv.block_pool import BlockPool
from forerun.kv.cache import KVCache
from forerun.models.base import LoadedTarget, TargetModel, check_draft_ranks, choose_attention
from forerun.models.config import HFConfig
from forerun.models.config_file import eos_token_ids, read_config
from forerun.models.decoder import Decoder
from forerun.models.loader import LOADERS, expected_bytes
from forerun.models.model_folder import QUANTIZATION_KEY
from forerun.models.packing import Packing
from forerun.models.store import resolve_model
from forerun.models.tokenizer import Tokenizer, load_tokenizer
from forerun.models.tokenizer_files import has_tokenizer, is_built_from_gguf
from forerun.ops.cuda.system import InstalledCuda
from forerun.ops.native.attention import NativeAttention
from forerun.ops.native.formats.blocks import row_bits_of
from forerun.ops.native.library import load_kernels, warn_if_not_built
from forerun.ops.native.memory import give_back_freed_memory
from forerun.ops.native.threads import OneTorchThread
from forerun.verify.matching import MatchingConfig

if TYPE_CHECKING:
    from forerun.executor.tensor_parallel.target import ShardedTarget

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltEngine:
    """An engine and what it was built from."""

    engine: Engine
    executor: LocalExecutor
    target: LoadedTarget
    speculative: SpeculativeConfig
    kv: KVBudget


def build_engine(
    settings: EngineSettings, *, once_loaded: Callable[[LoadedTarget], None] = lambda _: None
) -> BuiltEngine:
    """Load the target and assemble the engine; settings are checked before anything is loaded.

    `once_loaded` is called in between, for whoever computes with other threads than those that load.
    """
    speculative = resolve_speculative(
        merge_deprecated(
            settings.speculative_config,
            speculative_model=settings.speculative_model,
            speculative_method=settings.speculative_method,
            num_speculative_tokens=settings.num_speculative_tokens,
        ),
        settings.kv_transfer_config,
    )
    check_draft_ranks(speculative.num_draft_ranks, settings.tensor_parallel_size)
    device = settings.torch_device
    path = resolve_model(settings.model)
    target = load_target(path, settings, device, shows_progress=sys.stderr.isatty())
    once_loaded(target)
    return assemble(settings, target, speculative)


def load_target(
    path: Path, settings: EngineSettings, device: torch.device, *, shows_progress: bool = False
) -> LoadedTarget:
    """Load model and tokenizer from a folder or a GGUF file, in one process with a progress bar if that is asked for."""
    config = read_config(path)  # first of all, so that a folder that is no model is called just that
    dtype, packing = choose_arithmetic(settings, device, stored_dtype=_stored_dtype(config, settings))
    kernels = packing.kernels if packing else None
    if settings.device_step is not False and device.type == "cuda":
        use_kernel_table(settings, InstalledCuda(), device.index or 0, folder=cache_folder())
    memory, used_before = memory_of(device), 0
    if memory is not None:
        used_before = used_bytes(memory)
        _check_memory(path, settings, memory, dtype=dtype)
    with (
        as_current(device),
        loading(settings, memory),
        _without_collections(),
        ThreadPoolExecutor(max_workers=1) as thread,
    ):
        tokenizer = _begin_tokenizer(path, settings, thread)
        model: TargetModel
        sharded = None
        if settings.tensor_parallel_size > 1:
            sharded = _load_sharded(path, settings, dtype, packing, device)
            model = sharded.model
        else:
            load = LOADERS[settings.load_format]
            model = load(
                path,
                dtype=dtype,
                device=device,
                packing=packing,
                max_model_len=settings.max_model_len,
                shows_progress=shows_progress,
                before_copying=tokenizer,  # while it is built, it takes as much again as what is left of it
            )
        _check_activations(settings, model, path)
        loaded_tokenizer = tokenizer()
    if settings.max_model_len is None:
        _report_trained_length(model, config)
    target = LoadedTarget(
        model=model,
        attention=choose_attention(model.kv_specs, kernels),
        tokenizer=loaded_tokenizer,
        eos_token_ids=eos_token_ids(path, loaded_tokenizer),
        path=path,
        load_format=settings.load_format,
        kernels=kernels,
        used_before=used_before,
    )
    return target if sharded is None else replace(target, make_cache=sharded.make_cache, ranks=sharded.drafter_ranks)


def _report_trained_length(model: TargetModel, config: HFConfig) -> None:
    """Say so where a decoder could compute longer texts than those that it was trained on; see `DecoderConfig.for_texts_of`."""
    longest = config.get_text_config().max_position_embeddings if isinstance(model, Decoder) else 0
    if model.max_model_len < longest:
        logger.warning(
            "max_model_len is %d, the length that the model was trained on; set it, to %d at most, for longer texts: LongRoPE has "
            "other factors for those, by which shorter texts are computed somewhat worse",
            model.max_model_len,
            longest,
        )


def _check_memory(path: Path, settings: EngineSettings, memory: DeviceMemory, *, dtype: torch.dtype | None) -> None:
    """Look whether the GPU has room for the engine before anything is read.

    Raises:
        MemoryBudgetError: it has not.
    """
    check_share(settings, memory)
    if settings.load_format != "dummy":
        expected = expected_bytes(path, dtype=dtype)
        if expected is not None:
            check_weights(expected // settings.tensor_parallel_size, settings, memory)


@contextmanager
def _without_collections() -> Iterator[None]:
    """Keep Python's garbage collector from walking, again and again, the vocabulary that is being built."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _stored_dtype(config: HFConfig, settings: EngineSettings) -> torch.dtype | None:
    """The dtype of the checkpoint's weights; None where the configuration names none.

    Raises:
        ConfigError: weights that are quantized already shall be rounded again.
    """
    method = config.to_dict().get(QUANTIZATION_KEY)
    if not method:
        return config.dtype if isinstance(config.dtype, torch.dtype) else None
    if settings.quantization:
        raise ConfigError(
            f"quantization: got {settings.quantization!r}, but the checkpoint's weights are quantized already "
            f"({method['quant_method']}); leave it out"
        )
    return torch.bfloat16  # of what is not quantized; blocks keep their own values


def _load_sharded(
    path: Path, settings: EngineSettings, dtype: torch.dtype | None, packing: Packing | None, device: torch.device
) -> ShardedTarget:
    """The target in `tensor_parallel_size` processes, on the native kernels or in torch."""
    from forerun.executor.tensor_parallel.target import (  # here: one process needs neither
        PassLimits,
        load_sharded_target,
    )
    from forerun.executor.tensor_parallel.torch_target import load_torch_target

    limits = PassLimits(
        # drafters pass rows of their own, trees a level of each sequence at once; unused room costs nothing
        max_rows=2 * settings.max_num_batched_tokens + max(4096, MAX_SPECULATIVE_TOKENS * settings.max_num_seqs),
        max_num_seqs=settings.max_num_seqs,
        max_model_len=settings.max_model_len,
        block_size=settings.block_size,
    )
    load = (
        partial(load_torch_target, device=device) if packing is None else partial(load_sharded_target, packing=packing)
    )
    return load(
        path,
        load_format=settings.load_format,
        dtype=dtype,
        num_ranks=settings.tensor_parallel_size,
        limits=limits,
    )


def choose_arithmetic(
    settings: EngineSettings, device: torch.device, *, stored_dtype: torch.dtype | None
) -> tuple[torch.dtype | None, Packing | None]:
    """The dtype to compute in (None: the checkpoint's), and how to pack for the native kernels (None: torch computes).

    Raises:
        ConfigError: weights or activations of some format are asked for where there are no kernels.
    """
    asked = settings.torch_dtype
    kernels = load_kernels() if device.type == "cpu" and asked in (None, torch.float32, torch.bfloat16) else None
    if kernels is None:
        named = {"quantization": settings.quantization, "activation_dtype": settings.activation_dtype}
        for name, value in named.items():
            if value not in (None, "auto"):
                raise ConfigError(
                    f"{name}: got {value!r}, which the native CPU kernels compute; "
                    "they are not built or not for this device; leave it out"
                )
        if device.type == "cpu":
            warn_if_not_built()
        return asked or (torch.float32 if device.type == "cpu" else None), None
    dtype = asked or (torch.bfloat16 if stored_dtype == torch.bfloat16 else torch.float32)
    packing = Packing.choose(
        kernels,
        dtype=dtype,
        quantization=settings.quantization,
        row_bits=row_bits_of(settings.activation_dtype, kernels.level),
    )
    return packing.format.activations, packing


def row_bits_of_model(model: TargetModel) -> int:
    """See `Decoder.row_bits`."""
    return model.row_bits if isinstance(model, Decoder) else 0


def _check_activations(settings: EngineSettings, model: TargetModel, path: Path) -> None:
    """Raise `ConfigError` where a model's weights are not multiplied with numbers of the dtype that was asked for."""
    asked, rounded = settings.activation_dtype, settings.quantization
    if asked.startswith("int") and not row_bits_of_model(model):
        beside = f" with quantization={rounded!r}" if rounded is not None else ""
        raise ConfigError(
            f"activation_dtype: got {asked!r}, but{beside} no weight of {path} is in blocks, which alone are multiplied so; "
            f"leave {'one of them' if beside else 'it'} out, or set quantization='int4'"
        )
    if asked == "bfloat16" and model.dtype != torch.bfloat16:
        raise ConfigError(
            f"activation_dtype: got 'bfloat16', but {path} is computed in {str(model.dtype).removeprefix('torch.')}; "
            "leave it out, or set dtype='bfloat16'"
        )


def _begin_tokenizer(path: Path, settings: EngineSettings, thread: Executor) -> Callable[[], Tokenizer | None]:
    """What returns the tokenizer, which is built in a thread beside the weights' loading where that takes long.

    It returns None where the weights are made up and there is no tokenizer either.
    """
    if settings.tokenizer is None and settings.load_format == "dummy" and not has_tokenizer(path):
        return lambda: None
    source = path if settings.tokenizer is None else resolve_model(str(settings.tokenizer))
    if is_built_from_gguf(source):
        return thread.submit(load_tokenizer, source).result
    tokenizer = load_tokenizer(source)  # before any weight, so that what is wrong with it is said at once
    give_back_freed_memory()  # of what it was built from
    return lambda: tokenizer


def assemble(settings: EngineSettings, target: LoadedTarget, speculative: SpeculativeConfig) -> BuiltEngine:
    """Put the engine's parts together around a loaded target."""
    with as_current(target.model.device):
        return _assemble(settings, target, speculative)


def _assemble(settings: EngineSettings, target: LoadedTarget, speculative: SpeculativeConfig) -> BuiltEngine:
    """See `assemble`, on the thread's current GPU, where triton launches."""
    target, on_device = _place_layers(settings, target, speculative)
    if speculative.needs_exact_target and not target.model.is_batch_invariant:
        logger.info(
            "nothing is drafted: on this device drafts might change texts at near-ties; turn them on with speculative_config='auto'"
        )
        speculative = SpeculativeConfig()
    if not speculative.is_lossless:
        logger.warning("this configuration is lossy (%s): texts differ from the target's own", speculative.describe())
    model = target.model
    drafter = speculative.drafter.build(target_info(settings, target, speculative))
    num_kv_heads = None if target.ranks is None else target.ranks.num_kv_heads
    memory = memory_of(model.device)
    kv = plan_kv(
        settings,
        model,
        drafter,
        num_kv_heads=num_kv_heads,
        measure=None
        if memory is None
        else partial(_measure, settings, target, speculative, drafter, memory, on_device=on_device),
    )
    pool = BlockPool(kv.num_blocks, enable_prefix_caching=settings.enable_prefix_caching)
    source = "ngram" if isinstance(drafter, LooksUpNgrams) else speculative.method  # auto may do no more than look up
    exporter = HiddenStatesExporter(speculative.exported, speculative.storage) if speculative.storage else None
    executor = _make_executor(
        settings,
        target,
        speculative,
        max_model_len=kv.max_model_len,
        on_device=on_device,
        cache=_make_cache(settings, target, drafter, num_blocks=kv.num_blocks),
        drafting=GuardedDrafter(drafter, vocab_size=model.vocab_size, source=source),
        exporter=exporter,
    )
    _keep_pools(settings, executor, target)
    has_graphs = on_device and model.device.type == "cuda" and not settings.enforce_eager
    most_rows = _use_graphs(executor, settings) if has_graphs else None
    parts = EngineParts(
        processor=RequestProcessor(
            tokenizer=target.tokenizer,
            executor=executor,
            vocab_size=model.vocab_size,
            max_model_len=kv.max_model_len,
            eos_token_ids=target.eos_token_ids,
            pool=pool,
            block_size=settings.block_size,
            random_source=random.Random(settings.seed),
            files=exporter,
        ),
        pool=pool,
        scheduler=Scheduler(
            pool,
            SchedulerLimits(max_num_seqs=settings.max_num_seqs, max_num_batched_tokens=settings.max_num_batched_tokens),
            block_size=settings.block_size,
        ),
        executor=executor,
        control=speculative.control(profile_of(target), most_rows=most_rows),
        block_size=settings.block_size,
        files=exporter,
        executor_info=_describe_executor(settings, target, on_device=on_device),
    )
    return BuiltEngine(
        engine=Engine(parts, delay=int(on_device)),
        executor=executor,
        target=target,
        speculative=speculative,
        kv=kv,
    )


def _place_layers(
    settings: EngineSettings, target: LoadedTarget, speculative: SpeculativeConfig
) -> tuple[LoadedTarget, bool]:
    """The target whose layers compute the steps, and whether the device has all of a step.

    Raises:
        ConfigError: the settings ask for something that only such a step has.
    """
    on_device = steps_on_device(settings.device_step, target, speculative.verifier)
    if on_device:
        placed = with_layers_on_device(
            target, max_length=settings.max_model_len or target.model.max_model_len, matmul=settings.device_matmul
        )
        reason = None if settings.device_step else layers_differ(target, placed)
        if reason is None:
            return placed, True
        logger.warning(
            "torch computes the steps, not forerun's kernels for GPUs: on this one %s; please report it, with what "
            "forerun collect-env says",
            reason,
        )
    if settings.device_matmul != "kernels":
        raise ConfigError(
            f"device_matmul: got {settings.device_matmul!r}, but the steps are not computed on the device; set device_step=True, "
            "or leave it out"
        )
    return target, False


def _make_executor(
    settings: EngineSettings,
    target: LoadedTarget,
    speculative: SpeculativeConfig,
    *,
    max_model_len: int,
    on_device: bool,
    cache: KVCache,
    drafting: GuardedDrafter,
    exporter: HiddenStatesExporter | None = None,
) -> LocalExecutor:
    """The executor that the settings ask for."""
    make = _device_executor(settings, target, speculative, max_model_len=max_model_len) if on_device else LocalExecutor
    vocab_size = target.model.vocab_size
    return make(
        model=target.model,
        attention=target.attention,
        cache=cache,
        verifier=speculative.verifier.build(speculative.num_speculative_tokens),
        drafting=drafting,
        grammars=GrammarCache(target.tokenizer, vocab_size=vocab_size, eos_token_ids=target.eos_token_ids),
        torch_threads=OneTorchThread() if isinstance(target.attention, NativeAttention) else nullcontext(),
        exporter=exporter,
    )


def _measure(
    settings: EngineSettings,
    target: LoadedTarget,
    speculative: SpeculativeConfig,
    drafter: Drafter,
    memory: DeviceMemory,
    *,
    on_device: bool,
) -> MemoryShare:
    """Measure the GPU's memory with the largest steps, over a cache of one block.

    What the device drafts after a step is part of it; drafts of the host cost nothing here.
    """
    model, longest = target.model, settings.max_model_len or target.model.max_model_len
    has_graphs, sizes = on_device and not settings.enforce_eager, settings.graph_sizes

    def make_steps() -> MeasuredSteps:
        drafting = MeasuredDrafter(drafter)
        cache = _make_cache(settings, target, drafter if on_device else drafting, num_blocks=1)

        def run(num_sequences: int, num_rows: int) -> None:
            executor = _make_executor(
                settings,
                target,
                speculative,
                max_model_len=longest,
                on_device=on_device,
                cache=cache,
                drafting=GuardedDrafter(drafting, vocab_size=model.vocab_size),
            )
            LargestStep(
                num_sequences=num_sequences,
                num_rows=num_rows,
                longest=longest,
                num_drafted=speculative.num_speculative_tokens,
                block_size=settings.block_size,
            ).run(executor)

        return MeasuredSteps(
            largest=partial(run, settings.max_num_seqs, settings.max_num_batched_tokens),
            recorded=partial(run, min(settings.max_num_seqs, sizes[-1]), sizes[-1]) if has_graphs else None,
        )

    return measure_share(
        settings,
        memory,
        used_before=target.used_before,
        launch_bytes=_launch_bytes(settings, model) if has_graphs else 0,
        make_steps=make_steps,
    )


def _launch_bytes(settings: EngineSettings, model: TargetModel) -> int:
    """What the launches of graphs are given of a GPU's memory."""
    from forerun.executor.step_graphs import launch_bytes  # here: as DeviceExecutor

    return launch_bytes(model, settings.graph_sizes)


def _use_graphs(executor: LocalExecutor, settings: EngineSettings) -> int | None:
    """Have steps of each size recorded as a CUDA graph; return the rows of the largest one, None where there is none."""
    from forerun.executor.device import DeviceExecutor  # here: most engines compute their steps on the host
    from forerun.executor.step_graphs import CudaRecorder

    assert isinstance(executor, DeviceExecutor), "steps are computed on the device"
    executor.use_graphs(settings.graph_sizes, CudaRecorder(executor.model.device))
    return None if executor.graphs is None else executor.graphs.most_rows


def _device_executor(
    settings: EngineSettings, target: LoadedTarget, speculative: SpeculativeConfig, *, max_model_len: int
) -> Callable[..., LocalExecutor]:
    """What makes a `DeviceExecutor` of a local one's parts.

    Raises:
        ConfigError: another verifier than matching is asked for.
    """
    from forerun.executor.device import DeviceExecutor  # here: most engines compute their steps on the host
    from forerun.executor.device_slots import DeviceSlots

    if not isinstance(speculative.verifier, MatchingConfig):
        raise ConfigError(
            "rejection_sample_method: with device_step=True it may be matching, which is lossless too; leave one of them out"
        )
    slots = DeviceSlots(
        settings.max_num_seqs,
        max_length=max_model_len,
        block_size=settings.block_size,
        most_drafted=max(speculative.num_speculative_tokens, 1),
        vocab_size=target.model.vocab_size,
        device=target.model.device,
    )
    return partial(DeviceExecutor, slots)


def target_info(settings: EngineSettings, target: LoadedTarget, speculative: SpeculativeConfig) -> TargetInfo:
    """What a drafter is told of the target."""
    return TargetInfo(
        vocab_size=target.model.vocab_size,
        max_model_len=settings.max_model_len or target.model.max_model_len,
        num_speculative_tokens=speculative.num_speculative_tokens,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        block_size=settings.block_size,
        loaded=target,
    )


def _experts(target: LoadedTarget) -> dict[str, str]:
    """How many experts of each layer a row takes; empty where layers have none."""
    experts = target.model.config.experts if isinstance(target.model, Decoder) else None
    return {} if experts is None else {"experts": f"{experts.num_chosen} of {experts.num_experts}"}


def profile_of(target: LoadedTarget) -> CostProfile:
    """The file of what is known of a step's costs with this target on this machine."""
    model, kernels = target.model, target.kernels
    return CostProfile(
        model=target.path.name if target.path is not None else "in memory",
        identity={
            "dtype": str(model.dtype).removeprefix("torch."),
            "weight_bytes": model.weight_bytes,
            "row_bits": row_bits_of_model(model),
            "device": _device_name(model.device),
            "kernels": _named_kernels(target),
            "threads": torch.get_num_threads() if kernels is None else kernels.num_threads,
            **_experts(target),
        },
        folder=None if target.path is None else cache_folder() / "step-costs",
    )


def _named_kernels(target: LoadedTarget) -> str:
    if target.kernels is not None:
        return target.kernels.level
    if target.on_device is None or target.model.device.type != "cuda":
        return "torch"
    return "triton" if target.model.is_batch_invariant else "triton, products by torch"


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else describe_processor()


def _describe_executor(settings: EngineSettings, target: LoadedTarget, *, on_device: bool) -> ExecutorInfo:
    """What computes the steps of an engine."""
    device, kernels = target.model.device, "torch"
    if target.kernels is not None:
        kernels = f"native kernels, {target.kernels.level}"
    elif on_device and device.type == "cuda":
        kernels = "triton" if target.on_device is not None else "torch, and triton beside the layers"
        if settings.device_matmul == "torch":
            kernels += ", products by torch"
    name = "device" if on_device else "local"
    if settings.tensor_parallel_size > 1:
        name += f", {settings.tensor_parallel_size} processes"
    return ExecutorInfo(name, _device_name(device), kernels)


def _keep_pools(settings: EngineSettings, executor: LocalExecutor, target: LoadedTarget) -> None:
    """Let the drafter begin with the pools of the folder, and keep them there."""
    drafter = executor.drafting.drafter
    if settings.pools_folder is None:
        return
    if settings.load_format == "dummy":
        logger.warning("pools_folder: the weights are made up; nothing is loaded or saved")
        return
    if not isinstance(drafter, KeepsPools) or not drafter.pools:
        logger.warning("pools_folder: this drafter remembers nothing of past requests; nothing is loaded or saved")
        return
    identity = ModelIdentity(fingerprint=target.fingerprint(), name=Path(settings.model).name)
    pools = PoolFolder(Path(settings.pools_folder).expanduser(), drafter.pools, identity)
    pools.load()
    executor.keep_pools(pools)


def _make_cache(settings: EngineSettings, target: LoadedTarget, drafter: Drafter, *, num_blocks: int) -> KVCache:
    """The target's cache, and after its blocks those that only drafts write to; the drafter gets its share."""
    model = target.model
    num_scratch = drafter.num_scratch_blocks if isinstance(drafter, KeepsKV) else 0
    cache = target.make_cache(
        model.kv_specs,
        num_blocks=num_blocks + num_scratch,
        block_size=settings.block_size,
        dtype=model.dtype,
        device=model.device,
        feature_widths=feature_widths(model, drafter.needs),
    )
    if isinstance(drafter, KeepsKV):
        drafter.use_kv(cache, num_blocks=num_blocks)
    return cache
