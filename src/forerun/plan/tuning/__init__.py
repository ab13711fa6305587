"""The best configuration for given prompts at a given load: what to try, how to judge it, what to write down."""
