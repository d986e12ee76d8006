"""From text to token ids and back; knows nothing of the engine."""
