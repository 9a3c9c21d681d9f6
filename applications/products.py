"""credit_products as a script: python applications/products.py CONFIG [key=value ...]."""

import sys

from credit.cli.main import products

if __name__ == "__main__":
    sys.exit(products())
