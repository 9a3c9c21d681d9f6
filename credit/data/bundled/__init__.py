"""Data that ship with the package; ``path: sample:NAME`` in a config finds the folder NAME here."""
