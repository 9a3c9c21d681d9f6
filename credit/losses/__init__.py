"""Training losses: `credit.losses.base` has the base class and the registry, `credit.losses.build` builds a run's loss.

This file imports nothing, so that a config finds the section of a loss without importing torch.
"""
