"""Models in GGUF files (llama.cpp's format): their configuration, weights and tokenizer, read without transformers."""
