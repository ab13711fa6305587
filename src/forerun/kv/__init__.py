"""KV memory: block accounting, prefix cache, slots, and the tensors."""
