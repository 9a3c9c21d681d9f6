"""Noise inside a network (`model.noise`), so that the members of an ensemble differ.

`base` contains the base classes and the sequences of random numbers, `section` contains the config sections, and each
kind of noise has a separate module. `noise_input` and `noise_embedding` contain the layers that add noise to a network.
This module does not import torch, so that a config can look up the sections without torch.
"""
