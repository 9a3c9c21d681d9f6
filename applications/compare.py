"""credit_compare as a script: python applications/compare.py CONFIG [key=value ...]."""

import sys

from credit.cli.main import compare

if __name__ == "__main__":
    sys.exit(compare())
