"""``python -m pegaflow``: the command line, also installed as ``pegaflow``."""

import sys

from pegaflow.cli import main

if __name__ == "__main__":
    sys.exit(main())
