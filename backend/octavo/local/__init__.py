"""The embedded default: a bundled Triton server and a demo model."""
