"""What every other package of te_jax may import, and what imports none of them."""
