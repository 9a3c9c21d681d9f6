"""credit_plan as a script: python applications/plan.py CONFIG [key=value ...] --world-size N [--gpu NAME]."""

import sys

from credit.cli.main import plan

if __name__ == "__main__":
    sys.exit(plan())
