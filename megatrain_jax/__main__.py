"""The command line as `python -m megatrain_jax`, if its script is not on the path."""

import sys

from megatrain_jax._src.lm.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
