"""The small world on disk of the smoke tests."""

from tests.smoke.conftest import command, small_run  # noqa: F401
