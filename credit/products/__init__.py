"""Forecast products: derived fields, ensemble statistics, station values, cyclone tracks, maps and meteograms."""
