"""Reads the answers that a server has kept in its pools, to train a head on what its users ask for."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from forerun.drafters.lookup.text_index import BREAK
from forerun.drafters.pool_files import ModelIdentity, PoolFileError, check_model, file_of, read_pools
from forerun.errors import ConfigError
from forerun.train.texts import WrittenText

ANSWERS = "answers"
"""The kind of pool that holds whole answers: that of `auto`."""

NUM_READ = 16
"""Tokens at the beginning of an answer that are read and not learnt: what they answer is not kept."""


def read_pooled_texts(path: Path, model: ModelIdentity, *, most_tokens: int) -> list[WrittenText]:
    """Read the answers of a model's pools, those of requests without a cache salt only: others were given it to be kept apart.

    Args:
        path: the folder that the server has as pools_folder, or a file of `forerun pools export`.
        model: whose they must be.
        most_tokens: of an answer; longer ones are cut, as training takes memory by the square of a text's length.

    Raises:
        ConfigError: there is no file, it cannot be read or is of another model, or it holds no answer that may be used.
    """
    file = file_of(path, model) if path.is_dir() else path
    try:
        pools = read_pools(file)
        check_model(file, pools.model, model)
    except PoolFileError as error:
        raise ConfigError(f"--from-pool: {error}") from None
    sections = pools.kinds.get(ANSWERS, {})
    tokens = sections[None]["tokens"] if None in sections else np.zeros(0, dtype=np.int32)
    answers = [part[part != BREAK][:most_tokens] for part in np.split(tokens, np.flatnonzero(tokens == BREAK) + 1)]
    texts = [
        WrittenText(
            number=number,
            temperature=0.0,
            token_ids=answer.astype(np.uint32),
            spans=((NUM_READ, len(answer)),) if len(answer) > NUM_READ + 1 else (),
        )
        for number, answer in enumerate(answers)
    ]
    if not any(text.spans for text in texts):
        kept = ", ".join(pools.kinds) or "nothing"
        raise ConfigError(
            f"--from-pool: {file} has no answer of more than {NUM_READ + 1} tokens of a request without cache_salt (it keeps "
            f"{kept}); serve with method auto and --pools-folder for a while"
        )
    return texts
