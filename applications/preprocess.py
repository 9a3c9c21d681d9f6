"""credit_preprocess as a script: python applications/preprocess.py CONFIG [key=value ...]."""

import sys

from credit.cli.main import preprocess

if __name__ == "__main__":
    sys.exit(preprocess())
