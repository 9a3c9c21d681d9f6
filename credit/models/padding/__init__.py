"""Padding of a network's grid as the config describes it (``model.padding``).

This module does not import torch, so that a config can look up the section without torch.
"""
