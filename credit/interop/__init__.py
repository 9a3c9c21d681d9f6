"""Conversion of the configs of other packages."""
