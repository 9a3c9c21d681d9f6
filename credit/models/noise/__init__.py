"""Noise inside a network (`model.noise`), by which the members of an ensemble differ.

`base` has the base class and the draws, `section` the config sections, and each kind has a module of its own. This
module does not import torch, so that a config can look up the sections without it.
"""
