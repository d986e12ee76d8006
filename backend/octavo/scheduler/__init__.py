"""Who runs in a step, with how many tokens; knows nothing of torch, text or the server."""
