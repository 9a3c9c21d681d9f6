"""Sample data: a few fields of an atmosphere simulated with the model SPEEDY; see README.md."""
