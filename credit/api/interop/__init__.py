"""Interfaces of other packages, implemented on `credit.load`."""
