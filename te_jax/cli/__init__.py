"""The `te-jax` command. Each subcommand is a module with `add_arguments(parser)` and `run(args) -> int`."""
