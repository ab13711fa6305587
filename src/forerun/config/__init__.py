"""What users write, checked and resolved: engine settings, `speculative_config`, `kv_transfer_config`."""
