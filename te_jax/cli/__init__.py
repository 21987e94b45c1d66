"""The `te-jax` command. Each subcommand is a module with `add_arguments(parser)` and `run(args) -> int`.

`train` imports packages of the extra [train], so its `add_arguments` is in `_options`.
"""
