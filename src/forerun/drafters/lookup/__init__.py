"""Drafts from look-ups alone: the own text, past answers and the recycle table in one tree."""
