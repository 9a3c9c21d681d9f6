"""Table of the config keys of miles-credit 2026.2.0, with one row for each key, as plain data."""
