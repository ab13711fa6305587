"""forerun and its peers on the same weights, prompts and tokens, in one interleaved run."""
