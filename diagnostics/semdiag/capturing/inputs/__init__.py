"""What a model is given: files of tensors and token ids, and texts with their tokenizer."""
