"""The config of a run: a strict schema, and the way from YAML to it."""

from credit.config.load import build_config, dump_config, load_config
from credit.config.schema import Config

__all__ = ["Config", "build_config", "dump_config", "load_config"]
