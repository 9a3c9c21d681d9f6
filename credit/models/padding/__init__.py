"""Padding of a network's grid, built from the config section ``model.padding``.

This package file does not import torch, so that a config can be loaded without torch.
"""
