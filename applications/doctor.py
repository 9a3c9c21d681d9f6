"""credit_doctor as a script: python applications/doctor.py CONFIG [key=value ...]."""

import sys

from credit.cli.main import doctor

if __name__ == "__main__":
    sys.exit(doctor())
