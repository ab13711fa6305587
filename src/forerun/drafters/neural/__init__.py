"""What drafters with a neural network share: tree shapes, sampling, forward passes, draft writers, and KV of their own."""
