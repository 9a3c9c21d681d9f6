"""Kernels for one kind of hardware, each with its plain formulation, and the dispatch between the two."""
