"""One profile of the profiles of a server that was started with one configuration after the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from forerun.errors import ConfigError
from forerun.plan.profile import NAMES, PLAIN, SERVERS_KERNELS, Profile

SAME = (
    *NAMES,
    *("quantization", "tensor_parallel_size", "block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len"),
)
"""What may not differ: all but what is drafted, and the KV memory that a drafter leaves."""


def merged_profile(parts: Mapping[str, Profile]) -> Profile:
    """Put profiles of one server together, so that a plan may choose between what it ran.

    Each configuration keeps the step times that were measured with it. Prompts take what they take without speculation,
    where that was measured. KV memory is the least of all.

    Args:
        parts: profiles of `profile_server`, by the names that their configurations get.

    Raises:
        ConfigError: there are fewer than two, one was not measured at a server or is of another engine, or two have no
            speculation.
    """
    if len(parts) < 2:
        raise ConfigError(f"merge: got {len(parts)} profile(s); give two or more, of one server with different drafts")
    first, *others = parts
    for name, one in parts.items():
        if one.kernels != SERVERS_KERNELS or len(one.configs) + one.has_plain_steps != 1:
            raise ConfigError(
                f"merge: {name} is no profile of a server that was started once; a profile of this process measures all of "
                "--configs at once, and of one that was put together give the parts"
            )
    for name in others:
        for field in SAME:
            values = [getattr(parts[of], field) for of in (first, name)]
            if values[0] != values[1]:
                raise ConfigError(
                    f"merge: {first} and {name} are of another {field} ({values[0]!r}, {values[1]!r}); profile one server, at one "
                    "address, which is started alike but for what it drafts"
                )
    plain = [name for name, one in parts.items() if not one.configs]
    if len(plain) > 1:
        raise ConfigError(f"merge: {' and '.join(plain)} both have no speculation; give one of them")
    found = {name: one for name, one in parts.items() if one.configs}
    if PLAIN in found:
        raise ConfigError(f"merge: got the name {PLAIN} for a profile with drafts; rename its folder")
    return replace(
        parts[plain[0]] if plain else parts[first],
        num_blocks=min(one.num_blocks for one in parts.values()),
        has_plain_steps=bool(plain),
        served_steps={name: one.step_times for name, one in found.items()},
        configs={name: config for name, one in found.items() for config in one.configs.values()},
        drafting={name: cost for name, one in found.items() for cost in one.drafting.values()},
        acceptance={
            name + key.removeprefix(config): rates
            for name, one in found.items()
            for config in one.configs
            for key, rates in one.acceptance.items()
        },
        conditions={"merged": {name: one.conditions for name, one in parts.items()}},
    )
