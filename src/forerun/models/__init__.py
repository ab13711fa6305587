"""Models: where they come from, their configuration, weights and tokenizer, and the forward pass."""
