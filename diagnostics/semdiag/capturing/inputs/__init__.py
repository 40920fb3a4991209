"""Read a model's inputs: files of tensors and token ids, and texts with their tokenizer."""
