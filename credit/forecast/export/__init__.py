"""Export of forecasts to the layouts of other programs."""
