"""Plotting functions for the figures of scores, products and programs: style, units, legends and maps."""
