"""Half a dozen fields of a simulated atmosphere; see README.md."""
