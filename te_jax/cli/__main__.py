"""`python -m te_jax.cli` is `te-jax`."""

import sys

from te_jax.cli.main import main

sys.exit(main())
