"""The requests of a dataset."""

from __future__ import annotations

import logging
import random

from forerun.bench.load import files, synthetic
from forerun.bench.load.answer import LoadRequest
from forerun.bench.load.dataset import Dataset
from forerun.errors import ConfigError
from forerun.models.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


def draw_requests(dataset: Dataset, tokenizer: Tokenizer | None, count: int) -> list[LoadRequest]:
    """Draw `count` requests, some again where a file has fewer, unless the dataset says not to.

    Args:
        dataset: what to draw from; its seed decides what, and a larger `count` only adds to it.
        tokenizer: the model's; None where the dataset needs none.
        count: requests to draw.

    Raises:
        ConfigError: the file cannot be used, or lengths do not fit.
    """
    requests = _draw(dataset, tokenizer, count)
    missing = count - len(requests)
    if missing > 0 and not dataset.no_oversample:
        logger.warning("%s has %d fitting prompts: %d are sent again", dataset.dataset_path, len(requests), missing)
        requests += random.Random(dataset.seed).choices(requests, k=missing)
    return requests


def _draw(dataset: Dataset, tokenizer: Tokenizer | None, count: int) -> list[LoadRequest]:
    path = dataset.dataset_path
    if path is not None and dataset.dataset_name == "custom":
        return files.read_custom(dataset, path, tokenizer, count)
    if path is not None and dataset.dataset_name == "spec_bench":
        return files.read_spec_bench(dataset, path, tokenizer, count)
    if tokenizer is None:
        raise ConfigError(
            f"tokenizer: missing; {dataset.dataset_name} prompts are made with the model's; give --tokenizer"
        )
    if path is not None:
        return files.read_sharegpt(dataset, path, tokenizer, count)
    if dataset.dataset_name == "random":
        return synthetic.draw_random(dataset, tokenizer, count)
    return synthetic.draw_prefix_repetition(dataset, tokenizer, count)
