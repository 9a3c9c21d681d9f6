"""Layers that networks share: padding on the sphere, window attention, embedding, up-sampling and norms."""
