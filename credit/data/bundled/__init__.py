"""Sample data of the package; ``path: sample:NAME`` in a config refers to the folder NAME of this package."""
