"""credit_rollout as a script: python applications/rollout.py CONFIG [key=value ...]."""

import sys

from credit.cli.main import rollout

if __name__ == "__main__":
    sys.exit(rollout())
