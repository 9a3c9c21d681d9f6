"""credit_verify for launchers that want a script: torchrun applications/verify.py CONFIG [section.key=value ...]."""

import sys

from credit.cli.main import verify

if __name__ == "__main__":
    sys.exit(verify())
