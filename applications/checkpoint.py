"""credit_checkpoint as a script: python applications/checkpoint.py ACTION SAVE_LOC."""

import sys

from credit.cli.main import checkpoint

if __name__ == "__main__":
    sys.exit(checkpoint())
