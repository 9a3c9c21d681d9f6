"""credit_submit as a script: python applications/submit.py CONFIG [key=value ...] [--cluster NAME]."""

import sys

from credit.cli.main import submit

if __name__ == "__main__":
    sys.exit(submit())
