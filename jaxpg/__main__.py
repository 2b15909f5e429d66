"""`python -m jaxpg`: the command line."""

import sys

from jaxpg.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
