"""credit_preprocess for launchers that want a script: torchrun applications/preprocess.py CONFIG [section.key=value ...]."""

import sys

from credit.cli.main import preprocess

if __name__ == "__main__":
    sys.exit(preprocess())
