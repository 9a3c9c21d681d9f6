"""credit_train as a script: python applications/train.py CONFIG [key=value ...]."""

import sys

from credit.cli.main import train

if __name__ == "__main__":
    sys.exit(train())
