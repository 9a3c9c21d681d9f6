"""credit_completion as a script: python applications/completion.py SHELL."""

import sys

from credit.cli.main import completion

if __name__ == "__main__":
    sys.exit(completion())
