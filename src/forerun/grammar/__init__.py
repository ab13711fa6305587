"""Structured outputs: grammars are compiled, followed token by token, and met by drafts."""
