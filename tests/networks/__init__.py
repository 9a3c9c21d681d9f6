"""Every network through every feature of the package."""
