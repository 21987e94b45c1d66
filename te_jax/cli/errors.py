"""What a subcommand raises when the user can put it right."""


class UserError(Exception):
    """One sentence for the user: `te-jax` prints it to stderr without a traceback and exits with status 2."""
