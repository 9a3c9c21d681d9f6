"""Export of forecasts to the file layouts that other programs read."""
