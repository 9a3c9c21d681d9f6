"""Export of a trained model as a program that runs without this package."""
