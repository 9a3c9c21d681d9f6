"""credit_runs as a script: python applications/runs.py FOLDER."""

import sys

from credit.cli.main import runs

if __name__ == "__main__":
    sys.exit(runs())
