"""From a checkpoint to a forward pass; knows nothing of sequences or scheduling."""
