"""Tests of the conversion of configs of other packages."""
