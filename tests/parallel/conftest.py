"""Fixtures of the smoke tests that tests of several ranks use as well: `small_run` and `command`."""

from tests.smoke.conftest import command, small_run  # noqa: F401
