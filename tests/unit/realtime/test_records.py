"""Records that a config requires, indexes, and configs that are refused before the first request."""

from __future__ import annotations

import json
from typing import Any

import pytest

from credit.calendar import Calendar
from credit.config import Config, build_config, load_config
from credit.config.load import read_config
from credit.errors import ConfigError, DataError
from credit.realtime.fetch.fetcher import AnalysisFile
from credit.realtime.fetch.index import find_entries, parse_index
from credit.realtime.fetch.records import list_analysis_offsets, list_record_requests
from tests.conftest import REPOSITORY

MINUTES = Calendar().parse("2026-11-27T00:00")
GFS = """1:0:d=2026112700:PRMSL:mean sea level:anl:
2.1:990:d=2026112700:UGRD:500 mb:anl:
2.2:990:d=2026112700:VGRD:500 mb:anl:
3:1990:d=2026112700:HGT:0.4 mb:anl:
4:2500:d=2026112700:APCP:surface:0-6 hour acc fcst:
"""
NO_BYTES = """{"param": "t", "type": "fc", "levtype": "sfc", "date": "20261127", "time": "0000", "step": "0",
"_offset": 0, "_length": 0}""".replace("\n", " ")


def build_realtime_config(**changes: Any) -> Config:
    """Return the quickstart config with a section realtime; `changes` are keys of it and of ``data``."""
    document = read_config(REPOSITORY / "config" / "quickstart.yml")
    realtime = {"format": "gfs_idx", "url": "https://example.org/{date}/{cycle}"}
    realtime["fields"] = {"sst": {"param": "TMP", "level": "surface"}}
    document["realtime"] = realtime | changes.pop("realtime", {})
    document["data"] |= changes
    return build_config(document)


def test_records_of_gfs_and_ifs() -> None:
    descriptions = [request.describe() for request in list_record_requests(build_realtime_config())]
    expected = ["z850 (HGT:850 mb)", "z500 (HGT:500 mb)", "z250 (HGT:250 mb)", "t850 (TMP:850 mb)"]
    expected += ["t2m (TMP:2 m above ground)", "msl (PRMSL:mean sea level)", "sst (TMP:surface)"]
    assert descriptions == expected
    ifs = {"format": "ecmwf_index", "fields": {"sst": {"param": "sst"}}}
    descriptions = [request.describe() for request in list_record_requests(build_realtime_config(realtime=ifs))]
    assert descriptions[0] == "z850 (gh:850 hPa)"
    assert descriptions[-2:] == ["msl (msl:sfc)", "sst (sst:sfc)"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"realtime": {"fields": {}}}, "there is no built-in record of sst for gfs_idx"),
        ({"realtime": {"fields": {"ssst": {"param": "TMP"}}}}, 'did you mean "sst"'),
        ({"realtime": {"fields": {"sst": {"param": "TMP"}}}}, "realtime.fields.sst.level: is missing"),
        ({"realtime": {"fields": {"sst": {"param": "TMP", "level": "sea"}}}}, "cannot be compared"),
        ({"realtime": {"fields": {"sst": {"param": "WTMP", "level": "surface"}}}}, "short_name: is missing"),
        ({"variable_options": {"t": {"levels": [850]}, "sst": {"in_forecast": "observed", "missing": "fill_mean"}}},
         "needs values after the analysis"),
        ({"variable_options": {"t": {"levels": [850]}, "t2m": {"temporal": "mean"}}}, "a value over a period"),
    ],
)  # fmt: skip
def test_variables_without_record_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        list_record_requests(build_realtime_config(**changes))


@pytest.mark.parametrize("name", ["realtime_gfs", "realtime_ifs"])
def test_templates_need_only_records_of_an_analysis(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("SCRATCH", "ERA5_1DEG"):
        monkeypatch.setenv(variable, "/nowhere")
    config = load_config(REPOSITORY / "config" / f"{name}.yml")
    assert len(list_record_requests(config)) == 5 * 13 + 4
    assert list_analysis_offsets(config) == [0]


def test_precipitation_is_refused() -> None:
    variables = build_realtime_config().data.variables.model_dump()
    variables["prognostic"]["vars_2D"].append("tp")
    with pytest.raises(ConfigError, match="tp is a sum over a period.*make it diagnostic"):
        list_record_requests(build_realtime_config(variables=variables))
    variables["prognostic"]["vars_2D"].remove("tp")
    variables["diagnostic"]["vars_2D"].append("tp")
    assert "tp" not in [request.name for request in list_record_requests(build_realtime_config(variables=variables))]


def test_earlier_analyses() -> None:
    assert list_analysis_offsets(build_realtime_config(history_len=2)) == [0, 360]
    with pytest.raises(ConfigError, match="06 UTC|needs the analysis 6 h earlier"):
        list_analysis_offsets(build_realtime_config(history_len=2, realtime={"cycles": [0, 12]}))
    with pytest.raises(ConfigError, match="keep_analyses"):
        list_analysis_offsets(build_realtime_config(realtime={"keep_analyses": "12h"}))


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"url": "ftp://example.org/{date}/{cycle}"}, "must begin with http"),
        ({"url": "https://example.org/{date}/{hour}"}, '"{hour}" is not a placeholder'),
        ({"url": "https://example.org/{date}"}, "must contain {cycle}"),
        ({"url": "https://example.org/{date}/{cycle}/{"}, "is not part of a placeholder"),
        ({"url": "https://example.org/{date}/{cycle!r}/{cycle}"}, "is not part of a placeholder"),
        ({"cycles": [0, 0]}, "contains an hour twice"),
        ({"max_age": "3h"}, "must be at least available_after"),
    ],
)
def test_invalid_sections_are_refused(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_realtime_config(realtime=section)


def test_an_index_of_gfs() -> None:
    entries = parse_index(GFS, "gfs_idx")
    assert [(entry.param, entry.offset, entry.length) for entry in entries] == [
        ("PRMSL", 0, 990), ("UGRD", 990, 1000), ("VGRD", 990, 1000), ("HGT", 1990, 510), ("APCP", 2500, None),
    ]  # fmt: skip
    msl = list_record_requests(build_realtime_config())[5]
    assert find_entries(entries, msl, MINUTES) == [entries[0]]
    # An index of another cycle has no entry. A repeated line gives two entries.
    assert find_entries(entries, msl, MINUTES + 360) == []
    assert len(find_entries([*entries, entries[0]], msl, MINUTES)) == 1


def test_an_index_of_ecmwf_with_an_ensemble() -> None:
    """Entries of standard deviation and members are ignored, although parameter and level are those of the analysis."""
    row = {"date": "20261127", "time": "0000", "stream": "enfo", "step": "0", "levtype": "pl", "levelist": "500"}
    lines = []
    for number, kind in enumerate(("es", "pf", "cf", "em")):
        lines.append(json.dumps(row | {"param": "t", "type": kind, "_offset": 10 * number, "_length": 10}))
    assert [entry.offset for entry in parse_index("\n".join(lines), "ecmwf_index")] == [20]


@pytest.mark.parametrize(("hour", "stream"), [(0, "oper"), (6, "scda"), (12, "oper"), (18, "scda")])
def test_the_stream_of_ecmwf(hour: int, stream: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("SCRATCH", "ERA5_1DEG"):
        monkeypatch.setenv(variable, "/nowhere")
    realtime = load_config(REPOSITORY / "config" / "realtime_ifs.yml").realtime
    file = AnalysisFile.from_config(realtime, MINUTES + 60 * hour)
    folder = f"https://data.ecmwf.int/forecasts/20261127/{hour:02d}z/ifs/0p25/{stream}"
    assert file.url == f"{folder}/20261127{hour:02d}0000-0h-{stream}-fc.grib2"
    assert file.index_url == f"{folder}/20261127{hour:02d}0000-0h-{stream}-fc.index"


@pytest.mark.parametrize(
    ("text", "index_format", "message"),
    [
        ("", "gfs_idx", "empty"),
        ("<html>", "gfs_idx", 'line 1 of the index, "<html>"'),
        (GFS, "ecmwf_index", "line 1 of the index"),
        ('{"param": "t"}', "ecmwf_index", "not of the format ecmwf_index"),
        (NO_BYTES, "ecmwf_index", "line 1 of the index"),
        ("1:0:d=2026139900:PRMSL:mean sea level:anl:", "gfs_idx", "line 1"),
    ],
)
def test_invalid_indexes_are_refused(text: str, index_format: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        parse_index(text, index_format)
