"""Kernels (fast formulations of operations for some hardware) with their plain formulations, and the dispatch."""
