"""Measures whether `auto` loses nowhere: against plain decoding and against static configurations, in one interleaved run."""
