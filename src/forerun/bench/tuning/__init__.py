"""`forerun tune`: records the target's answers, simulates every configuration on them, and runs the best few."""
