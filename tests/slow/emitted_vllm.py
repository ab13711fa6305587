"""Runs in vLLM's environment: its parser and its engine's configuration read the arguments of `vllm serve`, as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser

if __name__ == "__main__":
    model, *options = json.loads(Path(sys.argv[1]).read_text())
    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args([model, *options])
    validate_parsed_serve_args(parsed)
    arguments = AsyncEngineArgs.from_cli_args(parsed)
    arguments.model = model
    config = arguments.create_engine_config()
    drafts = config.speculative_config
    found = {
        "max_num_seqs": config.scheduler_config.max_num_seqs,
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "max_model_len": config.model_config.max_model_len,
        "method": drafts and drafts.method,
        "num_speculative_tokens": drafts and drafts.num_speculative_tokens,
        "schedule": drafts and drafts.num_speculative_tokens_per_batch_size,
    }
    Path(sys.argv[2]).write_text(json.dumps(found))
