"""credit_check as a script: python applications/check.py CONFIG [key=value ...]."""

import sys

from credit.cli.main import check

if __name__ == "__main__":
    sys.exit(check())
