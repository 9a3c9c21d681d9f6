"""Noise inside a network (`model.noise`), by which the members of an ensemble differ.

`base` has the base classes and the sequences of draws, `section` has the config sections, and each kind of noise has a
module of its own. `noise_input` and `noise_embedding` have the layers through which a network takes noise. This module
does not import torch, so that a config can look up the sections without torch.
"""
