"""From the sources of a config to open files: globs, date patterns, the package's samples, a bounded set of handles."""

from __future__ import annotations

import glob
import json
import os
import re
import warnings
from collections import OrderedDict
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import xarray as xr

from credit.config.schema_source import SourceConfig
from credit.data.formats.grib import open_grib
from credit.data.formats.netcdf3 import missing_bytes
from credit.data.formats.plugin_source import open_plugin_source
from credit.data.formats.remote import is_remote, open_remote, remote_fingerprint
from credit.data.formats.select import select_positions
from credit.data.formats.units import require_packing
from credit.errors import ConfigError, DataError, did_you_mean

_DATE_PARTS = {"%Y": r"\d{4}", "%m": r"\d{2}", "%d": r"\d{2}", "%H": r"\d{2}", "%M": r"\d{2}", "%j": r"\d{3}"}
_TOKEN = re.compile(r"%.|\*\*/|\*|\?")
_WILDCARDS = {"**/": "(?:.*/)?", "*": "[^/]*", "?": "[^/]"}
_ZARR_MARKS = ("zarr.json", ".zmetadata", ".zgroup")
_GRIB_ENDINGS = (".grib", ".grib1", ".grib2", ".grb", ".grb1", ".grb2", ".gb", ".gb2")
_KINDS = {"netcdf": "netCDF file", "zarr": "zarr store"}


def expand_paths(source: SourceConfig, key: str) -> list[Path | str]:
    """Return the files and zarr stores of a source, each once; a pattern's matches are in order of name.

    Remote stores are URLs, as text; a source of a plugin is one file, whose name is its place in the config.

    Args:
        source: the source.
        key: its place in the config, for messages.

    Raises:
        ConfigError: for a date part that is not supported.
        DataError: where nothing is found.
    """
    if source.type is not None:
        return [f"{key} ({source.type})"]
    patterns = [source.path] if isinstance(source.path, str) else source.path
    found: dict[Path | str, None] = {}
    for pattern in patterns:
        found.update(dict.fromkeys(expand_path(pattern, f"{key}.path")))
    if not found:
        raise DataError(f"{key}.path: the list is empty; name at least one file")
    return list(found)


def expand_path(pattern: str, key: str) -> list[Path | str]:
    """Return the files and zarr stores that one path stands for, at least one; see `expand_paths`."""
    if is_remote(pattern):
        if "*" in pattern:
            raise DataError(f"{key}: {pattern}: patterns find files on disks only; list the stores")
        return [pattern]
    if pattern.startswith("sample:"):
        return _sample_files(pattern.removeprefix("sample:"), key)
    if not _TOKEN.search(pattern) and "[" not in pattern:
        path = Path(pattern)
        if not path.exists():
            raise DataError(f"{key}: {pattern} does not exist{_nearby(path)}")
        if path.is_dir() and not is_zarr(path):
            raise DataError(f"{key}: {pattern} is a folder and no zarr store; write {path}/*.nc for the files in it")
        return [path]
    regex = "".join(_as_regex(pattern, key))
    wide = re.sub("%.", "*", pattern)
    matches = [Path(name) for name in sorted(glob.glob(wide, recursive=True)) if re.fullmatch(regex, name)]
    if not matches:
        raise DataError(f"{key}: no file matches {pattern}{_nearby(Path(pattern))}")
    return matches


def _as_regex(pattern: str, key: str) -> list[str]:
    """A glob's matches are tried against this, so that %Y stands for four digits and not for any text."""
    parts, end = [], 0
    for token in _TOKEN.finditer(pattern):
        parts.append(_literal(pattern[end : token.start()]))
        if token[0] in _WILDCARDS:
            parts.append(_WILDCARDS[token[0]])
        elif token[0] in _DATE_PARTS:
            parts.append(_DATE_PARTS[token[0]])
        else:
            raise ConfigError(f"{key}: {pattern}: {token[0]} is not known; use {' '.join(_DATE_PARTS)}, * or ?")
        end = token.end()
    return [*parts, _literal(pattern[end:])]


def _literal(text: str) -> str:
    """Escape everything but a glob's character sets, [0-9]."""
    return "".join(part if part.startswith("[") else re.escape(part) for part in re.split(r"(\[[^\]]+\])", text))


def _sample_files(name: str, key: str) -> list[Path]:
    root = Path(str(resources.files("credit.data.sample")))
    names = [item.name for item in root.iterdir() if item.is_dir() and any(item.glob("*.nc"))]
    if name not in names:
        raise DataError(f'{key}: the package has no sample "{name}"{did_you_mean(name, names)}')
    return sorted((root / name).glob("*.nc"))


def _nearby(path: Path) -> str:
    """Return what the nearest existing folder holds, in words."""
    folder = path.parent
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if folder != path.parent:
        return f"; the folder {path.parent} does not exist"
    names = sorted(item.name for item in folder.iterdir())
    shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
    return f"; {folder} holds {shown}" if names else f"; {folder} is empty"


def is_zarr(path: Path) -> bool:
    """Whether `path` is a zarr store, by its name or by what lies in it."""
    return path.suffix == ".zarr" or any((path / mark).exists() for mark in _ZARR_MARKS)


def format_of(path: Path, configured: str) -> str:
    """Return ``netcdf``, ``zarr`` or ``grib``: as configured, else by the name's ending and the first bytes."""
    if configured != "auto":
        return configured
    if is_zarr(path):
        return "zarr"
    if path.suffix.lower() in _GRIB_ENDINGS:
        return "grib"
    try:
        with open(path, "rb") as file:
            return "grib" if file.read(4) == b"GRIB" else "netcdf"
    except OSError:
        return "netcdf"  # whose reader says what is wrong


def open_file(path: Path | str, source: SourceConfig) -> xr.Dataset:
    """Open a file lazily, cut to what its source selects; times stay encoded, packed values are unpacked when read.

    Raises:
        DataError: if it is missing or unreadable, or lacks what is selected.
    """
    if source.type is not None:
        return open_plugin_source(source, str(path))
    options = {"decode_times": False, "decode_timedelta": False, "chunks": None, "cache": False}
    if is_remote(path):
        return select_positions(open_remote(path, source.storage_options, **options), source.select, path)
    file_format = format_of(path, source.format)
    if file_format == "grib":
        return open_grib(path, source.select)
    if file_format == "netcdf":
        _refuse_truncated(path)
    engine = "netcdf4" if file_format == "netcdf" else "zarr"
    try:
        if file_format == "zarr":
            options["consolidated"] = _is_consolidated(path)
        with warnings.catch_warnings():
            # two fill values (CMIP writes float32 and float64 1e20) are both read as missing, as they should
            warnings.simplefilter("ignore", xr.SerializationWarning)
            dataset = xr.open_dataset(path, engine=engine, **options)
    except (OSError, ValueError, KeyError, RuntimeError, AttributeError, TypeError) as error:
        if isinstance(error, TypeError):
            # a coordinate, which is unpacked at once, has packing attributes that are no numbers
            with xr.open_dataset(path, engine=engine, decode_cf=False, chunks=None, cache=False) as raw:
                for name, variable in raw.variables.items():
                    require_packing(str(name), variable.attrs, str(path))
        raise _unreadable(path, file_format, error) from error
    return select_positions(dataset, source.select, str(path))


def _is_consolidated(path: Path) -> bool:
    """Whether a zarr store has its arrays' descriptions in one place; asking for them in vain makes xarray complain."""
    description = path / "zarr.json"
    if description.exists():
        return json.loads(description.read_text()).get("consolidated_metadata") is not None
    return (path / ".zmetadata").exists()


def _refuse_truncated(path: Path) -> None:
    try:
        missing = missing_bytes(path)
    except PermissionError as error:
        raise DataError(f"{path}: you may not read it (check chmod and the group)") from error
    except (OSError, EOFError, KeyError, IndexError) as error:
        raise _unreadable(path, "netcdf", error) from error
    if missing:
        raise _unreadable(path, "netcdf", EOFError(f"{missing} bytes are missing at its end"))


def _unreadable(path: Path, file_format: str, error: Exception) -> DataError:
    return DataError(
        f"{path}: cannot be read as a {_KINDS[file_format]} ({error}); it may be truncated, still being written, or of "
        "another format: copy it again, or set data.sources.N.format"
    )


def file_fingerprint(path: Path) -> list[int]:
    """Return size and time of change of a file, of a zarr store those of its description."""
    file = next((path / name for name in _ZARR_MARKS if (path / name).exists()), path)
    status = file.stat()
    return [status.st_size, status.st_mtime_ns]


def file_key(path: Path | str) -> str:
    """Return what a training store calls a source file: the absolute path, the URL, or the place of a plugin's."""
    return str(path.absolute() if isinstance(path, Path) else path)


class OpenFiles:
    """Keeps what was learnt of the files that were used last, of at most `most`; of GRIB files and plugins, always.

    Of a netCDF file that is some 100 kB. Its handle may be closed meanwhile: xarray keeps those of 128 files and opens
    others again, in about half of the time that looking at a file takes.

    After a fork, and after unpickling in a worker, files are opened anew: handles must not be shared by processes.
    GRIB files have no handles between reads, and sources of plugins see to theirs.

    Args:
        sources: the sources of the config.
        most: of how many files.
    """

    def __init__(self, sources: Sequence[SourceConfig], most: int = 1024) -> None:
        self._sources = list(sources)
        self._most = most
        self._owner = os.getpid()
        self._open: OrderedDict[tuple[Path | str, int], xr.Dataset] = OrderedDict()
        self._before = self._open
        self._lasting: dict[tuple[Path | str, int], xr.Dataset] = {}

    def get(self, path: Path | str, number: int) -> xr.Dataset:
        """Return a file of source `number`, open."""
        if self._owner != os.getpid():
            # what was open before a fork stays referred to: its connections are the parent's, not to be ended here
            self._owner, self._before, self._open = os.getpid(), self._open, OrderedDict()
        key, source = (path, number), self._sources[number]
        if key in self._lasting:
            return self._lasting[key]
        if key in self._open:
            self._open.move_to_end(key)
            return self._open[key]
        dataset = open_file(path, source)
        if source.type is not None or (not is_remote(path) and format_of(path, source.format) == "grib"):
            self._lasting[key] = dataset
            return dataset
        self._open[key] = dataset
        while len(self._open) > self._most:
            self._open.popitem(last=False)[1].close()
        return dataset

    def fingerprint(self, path: Path | str, number: int) -> list[int]:
        """Return two numbers that are others when the file is; of a zarr store or a plugin, when its description is."""
        if self._sources[number].type is not None:
            return self.get(path, number).encoding["fingerprint"]
        if is_remote(path):
            return remote_fingerprint(path, self._sources[number].storage_options)
        return file_fingerprint(path)

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_owner": -1, "_open": OrderedDict(), "_before": OrderedDict()}
