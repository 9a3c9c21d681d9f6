"""credit_realtime for launchers that want a script: python applications/realtime.py CONFIG [key=value ...]."""

import sys

from credit.cli.main import realtime

if __name__ == "__main__":
    sys.exit(realtime())
