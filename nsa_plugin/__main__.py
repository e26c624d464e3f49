"""``python -m nsa_plugin``: the command line where its script is not on PATH."""

import sys

from nsa_plugin.cli import main

if __name__ == "__main__":
    sys.exit(main())
