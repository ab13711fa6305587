"""The engine: configuration, scheduling, batching, the forward pass and the commit."""
