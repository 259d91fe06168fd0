"""`python -m forerun` is `forerun`."""

import sys

from forerun.cli import main

if __name__ == "__main__":
    sys.exit(main())
