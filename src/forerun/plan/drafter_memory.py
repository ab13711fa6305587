"""What a drafter takes of an engine's memory: weights, as far as they are known without loading them, tables, its part of KV blocks.

No torch is needed for that: sizes are those of the files' headers and of the profile. Nothing is downloaded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from forerun.core.cache_folder import MODELS_FOLDER, cache_folder
from forerun.core.finite_numbers import is_number
from forerun.drafters.registry import DRAFTERS, method_of_checkpoint, renamed_method
from forerun.errors import ConfigError, ForerunError
from forerun.models.gguf.file import open_gguf
from forerun.models.model_folder import (
    CONFIG_FILE,
    INDEX_FILE,
    QUANTIZATION_KEY,
    SINGLE_FILE,
    find_gguf,
    read_json,
    read_safetensors_header,
)
from forerun.plan.profile import Profile, with_underscores

LOOK_UPS = ("ngram", "ngram_gpu", "suffix", "recycle", "extract_hidden_states")
"""Methods without weights and without KV."""

AUTO_MEMORY = 0.1
"""What "auto" may take by default, as a share of the target's weights."""

MOST_AUTO_MEMORY = 100.0  # that it may be given

WIDTHS = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0}
"""Bytes of a weight as it is loaded, by the engine's dtype."""

LEAST_WIDTHS = {"float32": 4.0, "bfloat16": 1.5, "float16": 2.0}
"""The same, as the kernels may store it without changing it."""

MOST_ROUNDED, LEAST_ROUNDED = 34 / 32, 18 / 32
"""Bytes of a weight that is rounded to few bits: of a head in int4, and of a layer in int4-symmetric."""

FLOATS = ("F64", "F32", "F16", "BF16")
EMBEDDINGS = ("embed_tokens.weight", "token_embd.weight")  # as names of them end

UNREADABLE = (
    ForerunError,
    OSError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    ArithmeticError,
    RecursionError,
)
"""What reading a damaged file may raise."""

MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterMemory:
    """What a drafter takes, in bytes.

    `models` are the weights of each of its networks, which lie where the target's do, `tables` what look-ups may remember, in
    the host's memory, and `block` is what it adds to each KV block; `scratch` is what blocks take that drafts alone are
    written to, beside those of texts. `unknown` says of what the size is not known.
    """

    models: tuple[int, ...] = ()
    tables: int = 0
    block: int = 0
    scratch: int = 0
    unknown: tuple[str, ...] = ()


NOTHING = DrafterMemory()


def drafter_memory(profile: Profile, config: Mapping[str, Any] | None) -> DrafterMemory:
    """What the drafter of a configuration takes beside the profile's engine."""
    if config is None:
        return NOTHING
    found, alike = _weights(profile, config), profile.configs_like(config)
    measured = [profile.drafter_block_bytes[name] for name in alike if name in profile.drafter_block_bytes]
    scratch = [profile.drafter_scratch_bytes.get(name, 0) for name in alike]
    if measured or found == NOTHING:
        return replace(found, block=max(measured, default=0), scratch=max(scratch, default=0))
    return replace(found, unknown=(*found.unknown, "what the drafter adds to each KV block, as it was not profiled"))


def kv_memory(profile: Profile, drafter: DrafterMemory) -> int | None:
    """Bytes that an engine with a drafter gets for KV; None: the profile does not know them.

    On a CPU they hold as many blocks as were profiled, the drafter's part of each included. On a GPU, which the profiled engine
    filled, they are no more than that one had, and the drafter's weights and scratch blocks take of them.
    """
    profiled = _profiled_kv(profile)
    if profiled is None:
        return None
    if profile.device == "cuda":
        return max(0, profiled - sum(drafter.models) - drafter.scratch)
    return profiled + profile.num_blocks * drafter.block


def num_blocks(profile: Profile, config: Mapping[str, Any] | None) -> int:
    """KV blocks of an engine with a configuration: as many as it finds room for in its `kv_memory`.

    Raises:
        ConfigError: there is room for none.
    """
    if config is None or profile.device != "cuda":
        return profile.num_blocks
    drafter = drafter_memory(profile, config)
    profiled, left = _profiled_kv(profile), kv_memory(profile, drafter)
    if profiled is None or left is None:
        return profile.num_blocks
    found = left * profile.num_blocks // (profiled + profile.num_blocks * drafter.block)
    if not found:
        taken = sum(drafter.models) + drafter.scratch
        raise ConfigError(
            f"speculative_config: the drafter {config.get('model', config.get('method'))!r} takes {taken / MIB:.0f} MiB for its "
            f"weights and its drafts' KV, and the profile's engine has {profiled / MIB:.0f} MiB of KV memory; must leave room for a "
            "block of it: take a smaller drafter, or plan others with --method"
        )
    return found


def _profiled_kv(profile: Profile) -> int | None:
    if profile.kv_cache_memory_bytes is not None:
        return profile.kv_cache_memory_bytes
    if profile.kv_bytes_per_token is None:
        return None
    return profile.num_blocks * profile.block_size * profile.kv_bytes_per_token


def _weights(profile: Profile, config: Any) -> DrafterMemory:
    """Weights and tables of a `speculative_config`, or of that of a drafter within it."""
    if not isinstance(config, Mapping):
        return _unknown(f"the drafter {config!r:.80}")
    keys = with_underscores(config)
    method, model = keys.get("method"), keys.get("model")
    if method is None and isinstance(model, str):
        named = model.strip("[]")
        method = named if named in DRAFTERS else method_of_checkpoint(Path(model).name)
    method = renamed_method(str(method)) or str(method)
    if method in LOOK_UPS or (method == "self" and keys.get("exit_layer") is not None):
        return NOTHING
    if method == "hybrid" and isinstance(keys.get("drafters"), Sequence):
        return _sum(_weights(profile, one) for one in keys["drafters"])
    if method == "auto":
        return _of_auto(profile, keys)
    if method == "self":
        return _of_self(profile)
    if method == "mtp":
        return _of_mtp(profile)
    if method in DRAFTERS and isinstance(model, str):
        return _of_model(profile, model, is_rounded=keys.get("quantization") is not None)
    return _unknown(f"weights of the drafter {method!r:.80}")


def _of_auto(profile: Profile, keys: Mapping[str, Any]) -> DrafterMemory:
    """What "auto" may take, and a drafter of the user's own; a GPU that computes whole steps looks up by itself."""
    own = keys.get("drafter")
    if own is None and profile.device == "cuda" and profile.kernel_settings.get("device_step") is not False:
        return NOTHING
    given, share = NOTHING if own is None else _weights(profile, own), keys.get("auto_memory", AUTO_MEMORY)
    if profile.weight_bytes is None or not is_number(share) or not 0.0 <= share <= MOST_AUTO_MEMORY:
        return _sum([given, _unknown("what auto may take, a share of the target's weights")])
    of_its_own = ("the drafter that auto may find for itself",) if own is None and profile.device == "cuda" else ()
    return _sum([given, DrafterMemory(tables=int(share * profile.weight_bytes), unknown=of_its_own)])


def _of_self(profile: Profile) -> DrafterMemory:
    """The target in fewer bits: by its files, which are loaded again, or where these cannot be counted at most."""
    found = _of_model(profile, profile.model, is_rounded=True)
    if found.models:
        return found
    if profile.weight_bytes is None:
        return _unknown("weights of the target in fewer bits")
    # what is here and cannot be counted is quantized, too
    in_blocks = (
        profile.quantization is not None or profile.model.endswith(".gguf") or folder_of(profile.model) is not None
    )
    width = LEAST_ROUNDED if in_blocks else LEAST_WIDTHS.get(profile.dtype, LEAST_WIDTHS["bfloat16"])
    return DrafterMemory(models=(int(profile.weight_bytes * MOST_ROUNDED / width),))


def _of_mtp(profile: Profile) -> DrafterMemory:
    """A layer of the target and what goes before it, as "auto" counts them."""
    folder, num_layers = folder_of(profile.model), None
    if folder is not None and (folder / CONFIG_FILE).is_file():
        try:
            num_layers = read_json(folder / CONFIG_FILE).get("num_hidden_layers")
        except UNREADABLE:
            num_layers = None
    if profile.weight_bytes is None or not isinstance(num_layers, int) or num_layers < 1:
        return _unknown("weights of the target's MTP layers")
    return DrafterMemory(models=(2 * profile.weight_bytes // num_layers,))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loading:
    """How weights are loaded: floats at so many bytes each, those of an embedding apart, weights in blocks as they are or widened."""

    width: float
    embedding_width: float  # which is rounded by few formats
    keeps_blocks: bool

    def floats(self, name: str, shape: Sequence[int]) -> int:
        """Bytes of a tensor of floats."""
        return int((self.embedding_width if name.endswith(EMBEDDINGS) else self.width) * math.prod(shape))


def _of_model(profile: Profile, model: str, *, is_rounded: bool) -> DrafterMemory:
    """A model or a head of its own, by its files."""
    folder, dense = folder_of(model), WIDTHS.get(profile.dtype, WIDTHS["float32"])
    loading = _Loading(
        width=MOST_ROUNDED if is_rounded else dense,
        embedding_width=dense,
        keeps_blocks=profile.kernels.startswith("native") and profile.dtype == "bfloat16" and not is_rounded,
    )
    try:
        num_bytes = 0 if folder is None else _num_bytes(folder, loading)
    except UNREADABLE:
        num_bytes = 0
    if num_bytes <= 0:
        why = "whose files are not on this machine, cannot be read or hold weights that are widened"
        return _unknown(f"weights of the drafter {model!r:.80}, {why}")
    return DrafterMemory(models=(num_bytes,))


def _num_bytes(folder: Path, loading: _Loading) -> int:
    """Bytes of all weights of a folder or a GGUF file; 0: not known, as those of a quantized folder would be widened."""
    gguf = find_gguf(folder)
    if gguf is not None:
        places = open_gguf(gguf).tensors.items()
        return sum(one.num_bytes if loading.keeps_blocks else loading.floats(name, one.shape) for name, one in places)
    config = folder / CONFIG_FILE
    if not loading.keeps_blocks and config.is_file() and read_json(config).get(QUANTIZATION_KEY):
        return 0
    tensors = [item for file in _safetensors(folder) for item in read_safetensors_header(file).items()]
    return sum(
        loading.floats(name, one["shape"])
        if one["dtype"] in FLOATS
        else one["data_offsets"][1] - one["data_offsets"][0]
        for name, one in tensors
    )


def _safetensors(folder: Path) -> list[Path]:
    """The files that an engine reads of a folder."""
    if (folder / SINGLE_FILE).exists():
        return [folder / SINGLE_FILE]
    return [folder / name for name in sorted(set(read_json(folder / INDEX_FILE)["weight_map"].values()))]


def models_of(config: Any) -> list[str]:
    """The models that a `speculative_config` names: its drafter's, and those of the drafters within it."""
    if not isinstance(config, Mapping):
        return []
    several = config.get("drafters")
    within = [config.get("drafter"), *(several if isinstance(several, list) else ())]
    own = config.get("model")
    return [*([own] if isinstance(own, str) else ()), *(model for one in within for model in models_of(one))]


def folder_of(model: str) -> Path | None:
    """Where a model's files lie on this machine, looked for as an engine does: a path, a known name, a hub id; None: nowhere."""
    try:
        for path in (Path(model).expanduser(), cache_folder() / MODELS_FOLDER / model):
            if path.exists():
                return path
        from huggingface_hub import try_to_load_from_cache  # here: importing it takes a second

        found = try_to_load_from_cache(model, CONFIG_FILE)
    except (OSError, RuntimeError, ValueError):  # no name of a file, a user or a repository
        return None
    return Path(found).parent if isinstance(found, str) else None


def _unknown(what: str) -> DrafterMemory:
    return DrafterMemory(unknown=(what,))


def _sum(parts: Iterable[DrafterMemory]) -> DrafterMemory:
    """What drafters take that are there at once."""
    found = NOTHING
    for one in parts:
        found = DrafterMemory(
            models=(*found.models, *one.models),
            tables=found.tables + one.tables,
            unknown=(*found.unknown, *one.unknown),
        )
    return found
