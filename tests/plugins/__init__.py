"""Plugins as a user would write them: one file each, with public decorators and layers only."""
