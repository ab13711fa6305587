"""Attention over the paged KV cache, causal or masked by a tree."""
