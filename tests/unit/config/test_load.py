"""Building of the frozen config from YAML, overrides and environment variables; all problems are reported at once."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from credit.config import build_config, dump_config, load_config
from credit.errors import ConfigError

MINIMAL = {
    "save_loc": "runs/x",
    "data": {
        "sources": [{"path": "x.nc"}],
        "variables": {"prognostic": {"vars_3D": ["z"], "vars_2D": ["t2m"]}},
        "levels": [850, 500],
        "splits": {
            "train": ["2000-01-01", "2000-06-30"],
            "valid": ["2000-07-11", "2000-08-31"],
            "test": ["2000-09-11", "2000-12-31"],
        },
    },
    "model": {"type": "wxformer"},
    "trainer": {"max_steps": 10},
}


@pytest.fixture
def config_path(tmp_path: Path) -> Path:
    path = tmp_path / "config.yml"
    path.write_text(yaml.safe_dump(MINIMAL))
    return path


def collect_problems(raw: dict) -> str:
    with pytest.raises(ConfigError) as error:
        build_config(raw)
    assert error.value.exit_code == 2
    return str(error.value)


def with_key(dotted: str, value: object) -> dict:
    raw = yaml.safe_load(yaml.safe_dump(MINIMAL))
    node = raw
    *path, last = dotted.split(".")
    for key in path:
        node = node.setdefault(key, {})
    node[last] = value
    return raw


def test_round_trip_through_yaml(config_path: Path) -> None:
    config = load_config(config_path)
    assert build_config(yaml.safe_load(dump_config(config))) == config


@pytest.mark.parametrize(
    ("key", "spellings"),
    [
        ("data.timestep", [6, "6", "6h", "6 h", "360min", " 360 min", 0.25 * 24, "0.25d"]),
        ("data.split_gap", ["10d", "240h", 240]),
        ("inference.lead_times", [["30h", "2d"], [30, "48 h"], ["1.25d", "2880min"]]),
        ("inference.ensemble", [{"members": 2, "lagged": 6}, {"members": 2, "lagged": "6h"}]),
        ("verification.figure_leads", [["24h"], ["1d"], [24]]),
        ("trainer.walltime", ["90min", 1.5, "1.5h"]),
    ],
)
def test_durations_are_normalised(key: str, spellings: list) -> None:
    configs = [build_config(with_key(key, spelling)) for spelling in spellings]
    assert len({dump_config(config) for config in configs}) == 1
    assert all(config == configs[0] for config in configs)


def test_config_is_frozen(config_path: Path) -> None:
    with pytest.raises(ValidationError, match="frozen"):
        load_config(config_path).trainer.max_steps = 5


def test_overrides_reach_lists_and_new_sections(config_path: Path) -> None:
    config = load_config(
        config_path,
        ["trainer.learning_rate=1e-4", "data.sources.0.path=y.nc", "model.dim=[8,16,32,64]", "loss.kind=mae"],
    )
    assert config.trainer.learning_rate == 1e-4
    assert config.data.sources[0].path == "y.nc"
    assert config.model.dim == [8, 16, 32, 64]
    assert config.loss.kind == "mae"


def test_override_changes_one_of_two_shared_sections(tmp_path: Path) -> None:
    (tmp_path / "config.yml").write_text(yaml.safe_dump(MINIMAL) + "pbs: &jobs {nodes: 2}\nslurm: *jobs\n")
    config = load_config(tmp_path / "config.yml", ["pbs.nodes=3"])
    assert (config.pbs.nodes, config.slurm.nodes) == (3, 2)


@pytest.mark.parametrize("bad", ["trainer.max_steps", "=3", "data.sources.4.path=y", "trainer.max_steps.x=1"])
def test_invalid_overrides_are_refused(config_path: Path, bad: str) -> None:
    with pytest.raises(ConfigError, match="override"):
        load_config(config_path, [bad])


def test_environment_variables_are_expanded(config_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHERE", "/data")
    assert (
        load_config(config_path, ["data.sources.0.path=$WHERE/${WHERE}x.nc"]).data.sources[0].path == "/data//datax.nc"
    )
    with pytest.raises(ConfigError, match=r"data.sources.0.path.*no variable NOWHERE_SET"):
        load_config(config_path, ["data.sources.0.path=$NOWHERE_SET/x.nc"])


PATHS = (
    "save_loc", "data.store", "data.coefficients", "data.cache_folder", "data.sources.0.path", "data.sources.1.path.1",
    "data.sources.0.vertical.coefficients", "data.grid.like", "trainer.resume", "inference.checkpoint",
    "inference.folder", "verification.climatology.path", "verification.other_forecasts.theirs.path",
    "verification.other_forecasts.short", "verification.grid.like", "pbs.cluster", "pbs.template", "pbs.python",
    "slurm.cluster", "slurm.template", "slurm.python",
)  # fmt: skip


@pytest.mark.parametrize("key", PATHS)
def test_paths_may_begin_with_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    raw = with_key("data.level_units", "model_level")
    raw["data"] |= {
        "sources": [
            {"path": "a.nc", "vertical": {"surface_pressure": "sp", "coefficients": "b"}}, {"path": ["c.nc", "d.nc"]}
        ],
        "store": "s", "coefficients": "c", "cache": "disk", "cache_folder": "f", "grid": {"like": "g"},
    }  # fmt: skip
    raw["inference"] = {"checkpoint": "best"}
    raw["verification"] = {
        "climatology": {"method": "file", "path": "clim.nc"}, "grid": {"like": "g"},
        "other_forecasts": {"theirs": {"path": "x"}, "short": "y"},
    }  # fmt: skip
    raw["pbs"] = raw["slurm"] = {"cluster": "derecho"}
    (tmp_path / "config.yml").write_text(yaml.safe_dump(raw))

    def value(config: object) -> object:
        for name in key.split("."):
            if isinstance(config, dict):
                config = config[name]
            else:
                config = config[int(name)] if name.isdigit() else getattr(config, name)
        return getattr(config, "path", config)

    config = load_config("~/config.yml", [f"{key}=~/x/y.z"])
    assert value(config) == f"{tmp_path}/x/y.z"
    assert build_config(yaml.safe_load(dump_config(config))) == config
    with pytest.raises(ConfigError, match='"~no_such_user/x": the home folder of ~no_such_user is not known'):
        load_config("~/config.yml", [f"{key}=~no_such_user/x"])


def test_all_problems_are_reported_at_once() -> None:
    raw = with_key("trainer.max_step", 3)
    raw["trainer"]["amp"] = "perhaps"
    raw["model"]["dims"] = [1]
    raw["data"]["sources"][0]["paht"] = "x"
    raw["inference"] = {"lead_time": "soon"}
    text = collect_problems(raw)
    assert 'trainer.max_step: unknown key; did you mean "max_steps"?' in text
    assert "trainer.amp: 'perhaps'" in text
    assert 'model.dims: unknown key; did you mean "dim"?' in text
    assert 'data.sources.0.paht: unknown key; did you mean "path"?' in text
    assert "inference.lead_time: 'soon'" in text
    assert "5 problems" in text


def test_the_keys_of_a_section_are_listed_once() -> None:
    raw = with_key("trainer.qqq", 1)
    raw["trainer"] |= {"xxx": 2, "zzz": 3}
    raw["yyyy"] = 4
    text = collect_problems(raw)
    assert "4 problems" in text
    assert text.count("keys of trainer: activation_checkpoint, amp, ") == 1
    assert text.count("keys of the config: data, experiment, ") == 1
    assert "choices are" not in text


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("learning_rate", "learning_rate: unknown key; the key with this name is trainer.learning_rate"),
        ("data.max_steps", "data.max_steps: unknown key; the key with this name is trainer.max_steps"),
        ("model.edges", "model.edges: model.type wxformer has no such key; it is a key of swin. Remove it, or replace"),
        ("trainer.dim_head", "the key with this name is model.dim_head"),
        ("data.path", "the key with this name is data.sources.N.path or verification."),
        # A similar name in the same section has precedence. Without a similar name, the keys are listed.
        ("trainer.max_step", 'did you mean "max_steps"?'),
        ("inference.modes", "keys of inference: "),
    ],
)
def test_key_in_wrong_section_is_located(key: str, says: str) -> None:
    assert says in collect_problems(with_key(key, 1))


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("trainer.max_steps", True, "trainer: max_steps: true is not a value of this key; write a number"),
        ("trainer.weight_decay", False, "trainer: weight_decay: false is not a value"),
        ("data.levels", [850, 500, 500], "data.levels: [850, 500, 500]: 500 is listed twice; list each level once"),
        ("data.variable_options.z.levels", [850, 850], "850 is listed twice"),
        ("save_loc", 5, "save_loc: 5: must be text, but YAML reads the value as a number; write it in quotes"),
        ("data.variables.prognostic.vars_2D", ["t2m", False], "vars_2D.1: False: must be text, but YAML reads"),
        ("data.variables", [{"x": "y" * 500}], "yyy...: must be a section, which is a mapping of keys"),
        ("data.variables.diagnostic", {"vars_2D": ["t2m"]}, "- data.variables: t2m listed twice"),
    ],
)
def test_values_of_wrong_type_are_explained(key: str, value: object, says: str) -> None:
    text = collect_problems(with_key(key, value))
    assert says in text
    assert "500, 500] listed" not in text and len(text) < 400


def test_booleans_are_accepted_where_allowed() -> None:
    raw = with_key("trainer.amp", True)
    raw["trainer"] |= {"activation_checkpoint": True, "use_ema": False}
    raw["data"]["grid"] = {"rows": 32, "columns": 64, "poles": False}
    assert build_config(raw).trainer.activation_checkpoint is True


def test_yaml_merge_keys(tmp_path: Path) -> None:
    """``<<`` copies keys of another mapping. Keys beside it have precedence and do not count as repetitions."""
    raw = yaml.safe_load(yaml.safe_dump(MINIMAL))
    text = yaml.safe_dump(raw | {"trainer": None, "pbs": None, "slurm": None}).replace(
        "pbs: null\n", "pbs: &jobs\n  nodes: 2\n"
    )
    text = text.replace("slurm: null\n", "slurm: &more\n  <<: *jobs\n  nodes: 3\n")
    path = tmp_path / "config.yml"
    path.write_text(text.replace("trainer: null\n", "trainer:\n  max_steps: 10\n"))
    config = load_config(path)
    assert (config.pbs.nodes, config.slurm.nodes) == (2, 3)
    path.write_text("a: &a\n  x: 1\nb:\n  <<: *a\n  x: 2\n  x: 3\n")
    with pytest.raises(ConfigError, match='key "x" is given twice, first in line 5'):
        load_config(path)


@pytest.mark.parametrize("text", ["12:00:00", "6:00", "0:30"])
def test_times_of_day_are_refused_as_durations(config_path: Path, text: str) -> None:
    """YAML 1.1 reads these texts as 43200, 360 and 30, and a number would mean hours."""
    for key in ("pbs.walltime", "trainer.walltime"):
        with pytest.raises(ConfigError, match=f"{key}: '{text}': \"{text}\" is not a duration; write for example 6h"):
            load_config(config_path, [f"{key}={text}"])


def test_files_without_config_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.yml"
    for text, says in {
        "": "but the file is empty; `credit init quickstart`",
        "- a\n- b\n": "but this is a list",
        "a: 1\nb: 2\na: 3\n": 'key "a" is given twice, first in line 1\n.*line 3, column 1',
    }.items():
        path.write_text(text)
        with pytest.raises(ConfigError, match=f"(?s){says}"):
            load_config(path)


def test_unknown_model_names_the_nearest() -> None:
    assert 'did you mean "wxformer"?' in collect_problems(with_key("model.type", "wxfomer"))


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("trainer.num_epoch", 3, "exactly one of max_steps and num_epoch"),
        ("data.levels", [], "no levels"),
        ("inference.lead_time", "7h", "not a multiple of data.timestep"),
        ("data.variable_options.zz.minimum", 0, "not in data.variables"),
        ("trainer.backprop_on_timestep", [2], "between 1 and data.forecast_len"),
        ("data.variables.diagnostic", {"vars_2D": ["t2m"]}, "listed twice"),
        ("plugins", ["no_such_module_anywhere"], "cannot be imported"),
        ("data.variables.prognostic", {}, "at least one variable"),
        ("trainer.betas", [0.9, 1.0], "trainer.betas.1: 1.0"),
        ("loss.weights", {"z": -1.0}, "loss.weights.z: -1.0"),
    ],
)
def test_invalid_combinations_are_refused(key: str, value: object, says: str) -> None:
    assert says in collect_problems(with_key(key, value))


def test_error_of_plugin_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_plugin_that_raises.py").write_text("raise RuntimeError('half done')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert "RuntimeError: half done" in collect_problems(with_key("plugins", ["a_plugin_that_raises"]))


def test_daily_mean_radiation_excludes_time_of_day() -> None:
    raw = with_key("data.solar.mean", "daily")
    raw["data"]["variables"]["dynamic_forcing"] = {"vars_2D": ["sin_day"]}
    assert "no diurnal cycle" in collect_problems(raw)


def test_key_given_twice(tmp_path: Path) -> None:
    path = tmp_path / "config.yml"
    path.write_text("seed: 1\nseed: 2\n")
    with pytest.raises(ConfigError, match='"seed" is given twice'):
        load_config(path)


@pytest.mark.parametrize("text", ["[1, 2]", "a: [", ""])
def test_yaml_that_is_not_a_mapping_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.yml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="config"):
        load_config(path)


def test_dates_need_no_quotes(config_path: Path) -> None:
    config = load_config(config_path, ["data.splits.train=[2000-01-01, 2000-06-30]"])
    assert config.data.splits.train == ["2000-01-01", "2000-06-30"]


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path / "none.yml")


def test_binary_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.yml").write_bytes(b"save_loc: runs/fr\xfch\n")
    with pytest.raises(ConfigError, match="config.yml: byte 17 is not UTF-8"):
        load_config(tmp_path / "config.yml")
