"""Adapters that run models of `credit.load` in other packages."""
