"""credit_rollout for launchers that want a script: python applications/rollout.py CONFIG [key=value ...]."""

import sys

from credit.cli.main import rollout

if __name__ == "__main__":
    sys.exit(rollout())
