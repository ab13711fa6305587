"""`forerun serve`: OpenAI's HTTP interface over one engine."""
