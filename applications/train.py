"""credit_train for launchers that want a script: torchrun applications/train.py CONFIG [section.key=value ...]."""

import sys

from credit.cli.main import train

if __name__ == "__main__":
    sys.exit(train())
