"""Padding of a network's grid, built from the config section ``model.padding``.

This module does not import torch, so that a config can look up the section without torch.
"""
