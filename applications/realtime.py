"""credit_realtime as a script: python applications/realtime.py CONFIG [key=value ...]."""

import sys

from credit.cli.main import realtime

if __name__ == "__main__":
    sys.exit(realtime())
