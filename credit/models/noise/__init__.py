"""Noise inside a network (`model.noise`), which makes the members of an ensemble differ.

`base` has the base classes and the sequences of draws, `section` has the config sections, and each kind of noise has
its own module. `noise_input` and `noise_embedding` have the layers that add noise to a network. This module does not
import torch, so that a config can look up the sections without torch.
"""
