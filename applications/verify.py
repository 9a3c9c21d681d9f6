"""credit_verify as a script: python applications/verify.py CONFIG [key=value ...]."""

import sys

from credit.cli.main import verify

if __name__ == "__main__":
    sys.exit(verify())
