"""Training: tokenizer, language models. Loaded only by the commands that train."""
