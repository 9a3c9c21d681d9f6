"""The config of a run: its schema, and the functions that read it from YAML and write it."""

from credit.config.load import build_config, dump_config, load_config
from credit.config.schema import Config

__all__ = ["Config", "build_config", "dump_config", "load_config"]
