"""Conversations with tools: how they are laid out, and the forms in which models answer them: text, calls and reasoning."""
