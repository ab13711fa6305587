"""Target models: configuration, weights, tokenizer and the forward pass."""
