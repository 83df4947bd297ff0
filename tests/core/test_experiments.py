import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from importlib import resources

import numpy as np
import pandas as pd
import pytest

from icml24.core.experiments import (
    ResultCache,
    cache_directory,
    code_version,
    read_records,
    run,
    write_records,
)


@dataclass(frozen=True)
class Config:
    scale: float = 1.0
    name: str = "a"


def noisy(config, seed):
    return {"x": config.scale * np.random.default_rng(seed).normal(), "label": config.name}


def test_rows_are_grid_by_seed_in_order():
    frame = run(noisy, Config(), seeds=[3, 1], grid={"scale": [1.0, 2.0], "name": ["a", "b"]})
    assert frame["seed"].tolist() == [3, 1] * 4
    assert frame["scale"].tolist() == [1.0] * 4 + [2.0] * 4
    assert frame["label"].tolist() == ["a", "a", "b", "b"] * 2
    assert np.allclose(frame["x"][4:].to_numpy(), 2 * frame["x"][:4].to_numpy())


def test_jobs_and_cache_change_nothing(tmp_path):
    plain = run(noisy, Config(), seeds=3)
    cache = ResultCache(tmp_path)
    assert run(noisy, Config(), seeds=3, jobs=2).equals(plain)
    assert run(noisy, Config(), seeds=3, cache=cache).equals(plain)
    assert len(list(tmp_path.glob("*.pkl"))) == 3
    assert run(noisy, Config(), seeds=3, cache=cache).equals(plain)


def test_dask_changes_nothing():
    distributed = pytest.importorskip("distributed")
    plain = run(noisy, Config(), seeds=3)
    with distributed.LocalCluster(
        n_workers=1, threads_per_worker=1, processes=False, dashboard_address=None
    ) as cluster:
        assert run(noisy, Config(), seeds=3, dask=cluster.scheduler_address).equals(plain)


def test_cache_is_used_and_keyed_by_config_and_seed(tmp_path):
    cache = ResultCache(tmp_path)
    keys = {cache.key(noisy, Config(s), seed) for s in (1.0, 2.0) for seed in (0, 1)}
    assert len(keys) == 4
    key = cache.key(noisy, Config(), 0)
    cache.save(key, {"x": 42.0, "label": "stored"})
    assert run(noisy, Config(), seeds=1, cache=cache)["x"].tolist() == [42.0]


def test_key_follows_the_code(tmp_path, monkeypatch):
    package = tmp_path / "lab"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "helper.py").write_text("K = 1\n")
    (package / "work.py").write_text(
        "from lab import helper\ndef f(c, s): return {'k': helper.K}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    from lab.work import f

    before = code_version(f)
    (package / "helper.py").write_text("K = 2\n")
    code_version.cache_clear()
    assert code_version(f) != before


def test_a_damaged_record_is_computed_anew(tmp_path):
    cache = ResultCache(tmp_path)
    key = cache.key(noisy, Config(), 0)
    (tmp_path / f"{key}.pkl").write_bytes(b"half a rec")
    assert run(noisy, Config(), seeds=1, cache=cache).equals(run(noisy, Config(), seeds=1))


def test_a_failed_save_leaves_nothing_behind(tmp_path):
    cache = ResultCache(tmp_path)
    with pytest.raises(Exception, match="pickle"):
        cache.save("key", {"x": lambda: None})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_a_killed_run_keeps_what_it_finished(tmp_path):
    code = f"""
    import os, signal
    from dataclasses import dataclass
    from icml24.core.experiments import ResultCache, run
    @dataclass(frozen=True)
    class Config: pass
    def f(config, seed):
        if seed == 2: os.kill(os.getpid(), signal.SIGKILL)
        return {{"seed_squared": seed**2}}
    run(f, Config(), seeds=4, cache=ResultCache({str(tmp_path)!r}))
    """
    script = tmp_path / "killed.py"
    script.write_text(textwrap.dedent(code))
    done = subprocess.run([sys.executable, str(script)], check=False, capture_output=True)
    assert done.returncode == -signal.SIGKILL
    assert len(list(tmp_path.glob("*.pkl"))) == 2
    assert list(tmp_path.glob("*.tmp")) == []


def test_quiet_unless_in_a_terminal(capsys):
    run(noisy, Config(), seeds=2)
    assert capsys.readouterr() == ("", "")
    run(noisy, Config(), seeds=2, progress=True)
    assert "2/2" in capsys.readouterr().err


def test_cache_directory_follows_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("ICML24_CACHE", str(tmp_path))
    assert cache_directory() == tmp_path


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"config": {"scale": 1}}, TypeError, "dataclass"),
        ({"seeds": 0}, ValueError, "at least one run"),
        ({"seeds": [1, 1]}, ValueError, "differ"),
        ({"grid": {"size": [1]}}, ValueError, "no setting 'size'"),
        ({"grid": {"scale": []}}, ValueError, "empty"),
    ],
)
def test_bad_input_is_named(arguments, error, message):
    with pytest.raises(error, match=message):
        run(noisy, **{"config": Config(), **arguments})


def test_records_survive_the_file(tmp_path, monkeypatch):
    runs = pd.DataFrame(
        {"seed": np.arange(2), "loss": [1 / 3, 2e-9], "curve": [np.eye(2) / 3, np.zeros((2, 2))]}
    )
    (tmp_path / "data").mkdir()
    write_records(tmp_path / "data" / "runs.json", runs)
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["runs.json"]
    monkeypatch.setattr(resources, "files", lambda package: tmp_path)
    again = read_records("any", "runs.json")
    assert again["seed"].tolist() == [0, 1]
    np.testing.assert_allclose(again["loss"], runs["loss"], rtol=1e-5)
    np.testing.assert_allclose(again["curve"][0], runs["curve"][0], rtol=1e-5)
    with pytest.raises(FileNotFoundError, match=r"any ships no records named 'none.json'"):
        read_records("any", "none.json")


def test_a_record_that_cannot_be_stored_leaves_the_old_file(tmp_path):
    write_records(tmp_path / "runs.json", pd.DataFrame({"seed": [0]}))
    before = (tmp_path / "runs.json").read_text()
    with pytest.raises(TypeError):
        write_records(tmp_path / "runs.json", pd.DataFrame({"seed": [object()]}))
    assert (tmp_path / "runs.json").read_text() == before
    assert len(list(tmp_path.iterdir())) == 1
