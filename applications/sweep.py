"""credit_sweep as a script: python applications/sweep.py CONFIG [key=value ...]."""

import sys

from credit.cli.main import sweep

if __name__ == "__main__":
    sys.exit(sweep())
