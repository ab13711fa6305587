"""Runs in SGLang's environment: its parser reads the options of `sglang.launch_server`, as JSON."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from sglang.srt.server_args import ServerArgs

READ = (
    *("model_path", "dtype", "context_length", "max_running_requests", "chunked_prefill_size", "page_size", "tp_size"),
    *("speculative_algorithm", "speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens"),
)

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    parsed = parser.parse_args(json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps({name: getattr(parsed, name) for name in READ}))
