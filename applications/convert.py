"""credit_convert as a script: python applications/convert.py CONFIG [key=value ...]."""

import sys

from credit.cli.main import convert

if __name__ == "__main__":
    sys.exit(convert())
