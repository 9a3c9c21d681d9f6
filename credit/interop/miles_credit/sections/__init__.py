"""Conversion of the sections of a config of miles-credit."""
