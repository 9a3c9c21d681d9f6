"""Table of the config keys of miles-credit 2026.2.0, one row a key, as plain data."""
