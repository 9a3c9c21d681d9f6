"""Measurements on one GPU in a few minutes; `__main__` describes how to start them."""
