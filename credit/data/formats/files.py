"""Search and opening of source files: globs, date patterns, sample data, and a cache of open files."""

from __future__ import annotations

import glob
import os
import re
import warnings
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path

import xarray as xr

from credit.config.sections.source import SourceConfig
from credit.data.formats.grib.dataset import open_grib
from credit.data.formats.netcdf3 import count_missing_bytes
from credit.data.formats.plugin.source import open_plugin_source
from credit.data.formats.select import find_positions
from credit.data.formats.units import require_numeric_packing
from credit.data.formats.zarr.array_chunks import REMOTE_ARRAYS
from credit.data.formats.zarr.local import open_local_store
from credit.data.formats.zarr.remote import (
    DEFAULT_FETCHES,
    is_remote,
    open_remote_store,
    read_remote_fingerprint,
)
from credit.errors import ConfigError, DataError, did_you_mean

# Date code of a pattern (as in strftime) -> regular expression of its digits.
_DATE_CODES = {"%Y": r"\d{4}", "%m": r"\d{2}", "%d": r"\d{2}", "%H": r"\d{2}", "%M": r"\d{2}", "%j": r"\d{3}"}
# A date code or a wildcard in a pattern.
_TOKEN = re.compile(r"%.|\*\*/|\*|\?")
# Wildcard of a glob -> regular expression.
_WILDCARDS = {"**/": "(?:.*/)?", "*": "[^/]*", "?": "[^/]"}
# Names of the metadata files of zarr stores of format 3, and of format 2 (consolidated and not consolidated).
_ZARR_DESCRIPTIONS = ("zarr.json", ".zmetadata", ".zgroup")
_GRIB_ENDINGS = (".grib", ".grib1", ".grib2", ".grb", ".grb1", ".grb2", ".gb", ".gb2")
# Format -> name in error messages.
_FORMAT_NAMES = {"netcdf": "netCDF file", "zarr": "zarr store"}


def expand_paths(source: SourceConfig, key: str) -> list[Path | str]:
    """Return the files and zarr stores of a source without duplicates; files that match a pattern are sorted by name.

    A remote store is returned as its URL. A source of a plugin has no files; for this source, the result is a single
    string with the key and the type of the source, such as ``data.sources.0 (mytype)``.

    Args:
        source: section of the source in the config.
        key: key of this section, such as ``data.sources.0``.

    Raises:
        ConfigError: if the pattern has a date code that is not supported.
        DataError: if no file is found.
    """
    if source.type is not None:
        return [f"{key} ({source.type})"]
    patterns = [source.path] if isinstance(source.path, str) else source.path
    # A dictionary keeps the order and drops duplicates.
    paths: dict[Path | str, None] = {}
    for pattern in patterns:
        paths.update(dict.fromkeys(expand_path(pattern, f"{key}.path")))
    if not paths:
        raise DataError(f"{key}.path: the list is empty; name at least one file")
    return list(paths)


def expand_path(pattern: str, key: str) -> list[Path | str]:
    """Return the files and zarr stores that match a path or pattern, at least one; see `expand_paths`.

    Args:
        pattern: a path, a URL, a glob that may contain date codes such as %Y, or ``sample:NAME`` for sample data of the
            package.
        key: config key of the pattern, for error messages.

    Raises:
        ConfigError: if the pattern has a date code that is not supported.
        DataError: if no file is found, a folder is not a zarr store, or a URL has a wildcard.
    """
    if is_remote(pattern):
        if "*" in pattern:
            raise DataError(f"{key}: {pattern}: a URL cannot contain *; list the stores one by one")
        return [pattern]
    if pattern.startswith("sample:"):
        return _find_sample_files(pattern.removeprefix("sample:"), key)
    if not _TOKEN.search(pattern) and "[" not in pattern:
        path = Path(pattern)
        if not path.exists():
            raise DataError(f"{key}: {pattern} does not exist{_describe_nearest_folder(path)}")
        if path.is_dir() and not is_zarr(path):
            raise DataError(f"{key}: {pattern} is a folder, not a zarr store; write {path}/*.nc for the files in it")
        return [path]
    # The glob accepts any characters for a date code; the regular expression then accepts only digits.
    regex = _build_regex(pattern, key)
    candidates = sorted(glob.glob(re.sub("%.", "*", pattern), recursive=True))
    matches = [Path(name) for name in candidates if re.fullmatch(regex, name)]
    if not matches:
        raise DataError(f"{key}: no file matches {pattern}{_describe_nearest_folder(Path(pattern))}")
    return matches


def _build_regex(pattern: str, key: str) -> str:
    """Translate a glob with date codes into a regular expression; %Y, for example, becomes four digits.

    Args:
        pattern: the glob.
        key: config key of the glob, for error messages.

    Raises:
        ConfigError: if the pattern has a date code that is not supported.
    """
    pieces = []
    end = 0
    for token in _TOKEN.finditer(pattern):
        pieces.append(_escape(pattern[end : token.start()]))
        if token[0] in _WILDCARDS:
            pieces.append(_WILDCARDS[token[0]])
        elif token[0] in _DATE_CODES:
            pieces.append(_DATE_CODES[token[0]])
        else:
            raise ConfigError(f"{key}: {pattern}: {token[0]} is not supported; use {' '.join(_DATE_CODES)}, * or ?")
        end = token.end()
    pieces.append(_escape(pattern[end:]))
    return "".join(pieces)


def _escape(text: str) -> str:
    """Escape a string for a regular expression; character sets of a glob, such as [0-9], are not changed."""
    # With a group in its pattern, `re.split` also returns the separators, which are the character sets here.
    pieces = []
    for piece in re.split(r"(\[[^\]]+\])", text):
        is_character_set = piece.startswith("[")
        if not is_character_set:
            piece = re.escape(piece)
        pieces.append(piece)
    return "".join(pieces)


def _find_sample_files(name: str, key: str) -> list[Path]:
    """Return the netCDF files of the sample data `name` in the package, sorted by name.

    Raises:
        DataError: if the package has no sample data of this name.
    """
    root = Path(str(resources.files("credit.data.bundled")))
    names = [item.name for item in root.iterdir() if item.is_dir() and any(item.glob("*.nc"))]
    if name not in names:
        raise DataError(f'{key}: the package has no sample data "{name}"{did_you_mean(name, names)}')
    return sorted((root / name).glob("*.nc"))


def _describe_nearest_folder(path: Path) -> str:
    """Return the end of an error message about a missing file.

    The message lists some names in the folder of the file, or reports that the folder does not exist.
    """
    folder = path.parent
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if folder != path.parent:
        return f"; the folder {path.parent} does not exist"
    names = sorted(item.name for item in folder.iterdir())
    if not names:
        return f"; {folder} is empty"
    listed_names = ", ".join(names[:5])
    if len(names) > 5:
        listed_names += ", ..."
    return f"; {folder} contains {listed_names}"


def is_zarr(path: Path) -> bool:
    """Return True if `path` is a zarr store, based on the ending of its name or the files that it contains."""
    if path.suffix == ".zarr":
        return True
    return any((path / name).exists() for name in _ZARR_DESCRIPTIONS)


def detect_format(path: Path, configured: str) -> str:
    """Return the format of a file: ``netcdf``, ``zarr`` or ``grib``.

    Args:
        path: path of a file or zarr store on a disk.
        configured: value of ``data.sources.N.format``, which is returned unless it is ``auto``. For ``auto``, the
            format is found from the name and the first bytes of the file.
    """
    if configured != "auto":
        return configured
    if is_zarr(path):
        return "zarr"
    if path.suffix.lower() in _GRIB_ENDINGS:
        return "grib"
    # A GRIB file without a usual ending is recognised by its first bytes.
    try:
        with open(path, "rb") as file:
            if file.read(4) == b"GRIB":
                return "grib"
    except OSError:
        # Opening the file as netCDF then reports the reason.
        pass
    return "netcdf"


def open_file(path: Path | str, source: SourceConfig, max_fetches: int = DEFAULT_FETCHES) -> xr.Dataset:
    """Open a file lazily, and select the positions that ``select`` of its source defines.

    Times are not decoded. Packed values are unpacked when they are read.

    Args:
        path: path of the file, as `expand_paths` returned it.
        source: section of the source in the config.
        max_fetches: largest number of requests to a remote store that run at the same time.

    Raises:
        DataError: if the file is missing or unreadable, or does not have the selected positions.
        ConfigError: if ``select`` names a key that a GRIB file cannot have.
    """
    if source.type is not None:
        return open_plugin_source(source, str(path))
    # Use no dask arrays (`chunks`), and keep no copy of the values that were read (`cache`).
    options = {"decode_times": False, "decode_timedelta": False, "chunks": None, "cache": False}
    if is_remote(path):
        dataset = open_remote_store(path, source.storage_options, max_fetches, **options)
        position_of_dim = find_positions(dataset, source.select, path)
        dataset.encoding[REMOTE_ARRAYS].fixed_positions = position_of_dim
        return _select_positions(dataset, position_of_dim)
    file_format = detect_format(path, source.format)
    if file_format == "grib":
        return open_grib(path, source.select)
    # netCDF or zarr on a disk.
    if file_format == "netcdf":
        _require_complete_file(path)
    engine = "netcdf4" if file_format == "netcdf" else "zarr"
    try:
        with warnings.catch_warnings():
            # CMIP files have two fill values, 1e20 in float32 and float64. xarray warns, but reads both as missing.
            warnings.simplefilter("ignore", xr.SerializationWarning)
            if file_format == "zarr":
                dataset = open_local_store(path, **options)
            else:
                dataset = xr.open_dataset(path, engine=engine, **options)
    except (OSError, ValueError, KeyError, RuntimeError, AttributeError, TypeError) as error:
        if isinstance(error, TypeError):
            # Coordinates are unpacked when the file is opened, which fails if a packing attribute is not a number.
            with xr.open_dataset(path, engine=engine, decode_cf=False, chunks=None, cache=False) as raw_dataset:
                for name, variable in raw_dataset.variables.items():
                    require_numeric_packing(str(name), variable.attrs, str(path))
        raise _build_unreadable_error(path, file_format, error) from error
    return _select_positions(dataset, find_positions(dataset, source.select, str(path)))


def _select_positions(dataset: xr.Dataset, position_of_dim: Mapping[str, int]) -> xr.Dataset:
    """Select one position along each given dimension of a dataset, and keep the encoding of the full dataset."""
    if not position_of_dim:
        return dataset
    selected = dataset.isel(position_of_dim)
    selected.encoding = dataset.encoding
    return selected


def _require_complete_file(path: Path) -> None:
    """Raise DataError if a netCDF file is truncated, or cannot be read."""
    try:
        num_missing = count_missing_bytes(path)
    except PermissionError as error:
        raise DataError(f"{path}: permission denied; check the owner, the group and chmod") from error
    except (OSError, EOFError, KeyError, IndexError) as error:
        raise _build_unreadable_error(path, "netcdf", error) from error
    if num_missing:
        raise _build_unreadable_error(path, "netcdf", EOFError(f"{num_missing} bytes are missing at its end"))


def _build_unreadable_error(path: Path, file_format: str, error: Exception) -> DataError:
    """Return the DataError for a file that cannot be read in the format `file_format`, ``netcdf`` or ``zarr``."""
    return DataError(
        f"{path}: cannot be read as a {_FORMAT_NAMES[file_format]} ({error}); it may be truncated, still being "
        "written, or of a different format: copy it again, or set data.sources.N.format"
    )


def read_file_fingerprint(path: Path) -> list[int]:
    """Return the size of a file in bytes, and the time of its last change in nanoseconds since 1970.

    For a zarr store, the metadata file is used, because the modification time of a folder does not change when chunks
    change.

    Raises:
        OSError: if the file does not exist or cannot be accessed.
    """
    for name in _ZARR_DESCRIPTIONS:
        if (path / name).exists():
            path = path / name
            break
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]


def build_file_key(path: Path | str) -> str:
    """Return the key under which a training store lists a source file.

    The key is the absolute path of a file, the URL of a remote store, or the string that `expand_paths` returns for a
    plugin.
    """
    if isinstance(path, Path):
        path = path.absolute()
    return str(path)


class OpenFiles:
    """Cache of the datasets of source files, which keeps the datasets that were used last.

    Datasets of GRIB files and plugins are never dropped. The dataset of a netCDF file uses about 100 kB of memory.
    xarray keeps the handles of at most 128 files open and reopens other files when they are read. Reopening takes about
    half as long as creating a dataset.

    After a fork, and after unpickling in a worker, files are opened again, because processes must not share handles.
    GRIB files have no open handles between reads, and sources of plugins manage their handles themselves.

    Args:
        sources: the sources of the config.
        max_files: largest number of datasets to keep, without GRIB files and plugins.
        max_fetches: largest number of requests to a remote store that run at the same time.
    """

    def __init__(
        self, sources: Sequence[SourceConfig], max_files: int = 1024, max_fetches: int = DEFAULT_FETCHES
    ) -> None:
        self._sources = list(sources)
        self._max_fetches = max_fetches
        self._max_files = max_files
        # Id of the process that opened the files.
        self._owner = os.getpid()
        self._datasets: OrderedDict[tuple[Path | str, int], xr.Dataset] = OrderedDict()
        self._datasets_of_parent = self._datasets
        self._permanent_datasets: dict[tuple[Path | str, int], xr.Dataset] = {}

    def get(self, path: Path | str, source_number: int) -> xr.Dataset:
        """Return the dataset of a file, and open the file if necessary.

        Args:
            path: path of the file, as `expand_paths` returned it.
            source_number: index of the source of the file in ``data.sources``.

        Raises:
            DataError: for the same reasons as `open_file`.
            ConfigError: for the same reasons as `open_file`.
        """
        if self._owner != os.getpid():
            # After a fork, keep a reference to the parent's datasets, so that this process does not close their files.
            self._datasets_of_parent = self._datasets
            self._datasets = OrderedDict()
            self._owner = os.getpid()
        key = (path, source_number)
        if key in self._permanent_datasets:
            return self._permanent_datasets[key]
        if key in self._datasets:
            self._datasets.move_to_end(key)
            return self._datasets[key]
        source = self._sources[source_number]
        dataset = open_file(path, source, self._max_fetches)
        # Keep GRIB files and plugins: they have no open file, and opening them again is slow.
        is_plugin = source.type is not None
        is_grib = not is_plugin and not is_remote(path) and detect_format(path, source.format) == "grib"
        if is_plugin or is_grib:
            self._permanent_datasets[key] = dataset
            return dataset
        self._datasets[key] = dataset
        # Close the least recently used dataset first.
        while len(self._datasets) > self._max_files:
            _, oldest_dataset = self._datasets.popitem(last=False)
            oldest_dataset.close()
        return dataset

    def fingerprint(self, path: Path | str, source_number: int) -> list[int]:
        """Return two integers that change when a file changes.

        For a file on a disk, the integers are its size and its time of change, see `read_file_fingerprint`. For a
        remote store or a plugin, they are the size and the checksum of its metadata.

        Args:
            path: path of the file, as `expand_paths` returned it.
            source_number: index of the source of the file in ``data.sources``.

        Raises:
            DataError: if a remote store or a plugin cannot be read.
            OSError: if a file does not exist.
        """
        if self._sources[source_number].type is not None:
            return self.get(path, source_number).encoding["fingerprint"]
        if is_remote(path):
            return read_remote_fingerprint(path, self._sources[source_number].storage_options)
        return read_file_fingerprint(path)

    def __getstate__(self) -> dict[str, object]:
        # No process has the id -1, so a process that unpickles this object opens the files again.
        return self.__dict__ | {"_owner": -1, "_datasets": OrderedDict(), "_datasets_of_parent": OrderedDict()}
