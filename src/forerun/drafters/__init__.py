"""Drafters: each bets on the next tokens in its own way, blind to the others and to the verifier."""
