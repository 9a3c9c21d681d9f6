"""Kernels (fast implementations of operations for some hardware) and their plain formulations with torch operators."""
