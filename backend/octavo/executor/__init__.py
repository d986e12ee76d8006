"""From a scheduling decision to logits, on one device."""
