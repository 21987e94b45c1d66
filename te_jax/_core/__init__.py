"""Helpers that every other package of te_jax may import, and that import none of them."""
