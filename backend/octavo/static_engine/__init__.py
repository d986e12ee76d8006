"""The traditional mode: batches of whole requests through transformers' own generation."""
