"""Who owns which KV block; knows nothing of tensors."""
