"""The version of te_jax: the wheel, the extensions and `te_jax.__version__` all read this line."""

__version__ = "0.3.0"
