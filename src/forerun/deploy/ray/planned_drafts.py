"""Which of a profile's configurations the replicas run: the only ones that their planner may reckon with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from forerun.config.drafter_config import read_keys
from forerun.config.speculative_config import AUTO, DEFAULT, merge_deprecated
from forerun.errors import ConfigError
from forerun.plan.profile import Profile


def planned_methods(profile: Profile, settings: Mapping[str, Any]) -> list[str]:
    """Names of the profile's configurations that are the replicas' own, but for the lengths of drafts; none: they draft nothing.

    By default replicas are taken to draft, with "auto".

    Args:
        profile: by which the number of replicas is planned.
        settings: arguments of `LLM` for each replica.

    Raises:
        ConfigError: the profile does not know what the replicas do.
    """
    given = merge_deprecated(
        settings.get("speculative_config", DEFAULT),
        speculative_model=settings.get("speculative_model"),
        speculative_method=settings.get("speculative_method"),
        num_speculative_tokens=settings.get("num_speculative_tokens"),
    )
    config = read_keys({"method": AUTO} if given in (AUTO, DEFAULT) else given or {})
    if not config or config.get("num_speculative_tokens") == 0:
        profile.steps_of(None)  # refuses a server that always drafts
        return []
    found = profile.configs_like(config)
    if not found:
        raise ConfigError(
            f"scaling_profile: has nothing of what the replicas draft with, {json.dumps(config, default=str):.200}; has "
            f"{', '.join(profile.configs) or 'no configuration'}: profile it with forerun profile --configs, or deploy "
            "replicas that draft as was profiled, or with --no-speculation"
        )
    return [name for name in found if read_keys(profile.configs[name]) == config] or found
