"""An output head and what is computed from its logits, which exist for a few thousand tokens at a time."""
