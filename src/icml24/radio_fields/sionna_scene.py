"""The field's own ray tracer behind the same two methods as our room (optional extra ``rt``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple
from xml.etree.ElementTree import Element, SubElement, tostring

import numpy as np
from numpy.typing import ArrayLike

from icml24.radio_fields.channel import (
    SPEED_OF_LIGHT,
    Array,
    check_frequency,
    check_positions,
)
from icml24.radio_fields.rooms import Paths

_THICKNESS = 0.1
__all__ = ["Box", "SionnaScene", "furnished_room"]


class Box(NamedTuple):
    """A piece of furniture, or any other solid box.

    Parameters
    ----------
    center, size : sequence of 3 floats
        Metres.
    material : str
        A material of ITU-R P.2040: "wood", "metal", "glass", "chipboard", ...
    """

    center: Sequence[float]
    size: Sequence[float]
    material: str = "wood"

    def contains(self, points: ArrayLike, margin: float = 0.0) -> Any:
        """Say which points, shape (..., 3), lie in the box or within ``margin`` of it."""
        away = np.abs(np.asarray(points, float) - np.asarray(self.center))
        return (away <= np.asarray(self.size) / 2 + margin).all(axis=-1)


def furnished_room(
    size: Sequence[float], furniture: Sequence[Box] = (), *, walls: str = "concrete"
) -> str:
    """Write the scene of a room with one corner at the origin and boxes in it, for SionnaScene.

    Parameters
    ----------
    size : sequence of 3 floats
        Width, depth and height of the room, metres.
    furniture : sequence of Box
    walls : str, default "concrete"
        Material of walls, floor and ceiling, which are 10 cm thick.

    Returns
    -------
    str
        XML text.

    Raises
    ------
    ValueError
        If a size is not positive, or a piece of furniture sticks out of the room.

    Examples
    --------
    >>> text = furnished_room((5, 4, 2.7), [Box((1, 1, 0.5), (0.8, 0.8, 1.0))])
    >>> text.count("<shape"), "wood" in text
    (7, True)
    """
    room = np.asarray(size, float)
    if room.shape != (3,) or not np.all(np.isfinite(room)) or (room <= 0).any():
        raise ValueError(f"size must be three positive lengths in metres, got {size}.")
    items = []
    for axis in range(3):
        for side in (0.0, 1.0):
            center, extent = room / 2, room.copy()
            center[axis], extent[axis] = side * room[axis] + (side - 0.5) * _THICKNESS, _THICKNESS
            items.append(Box(center.tolist(), extent.tolist(), walls))
    for box in furniture:
        center, half = np.asarray(box.center, float), np.asarray(box.size, float) / 2
        if (half <= 0).any():
            raise ValueError(f"The size of a piece of furniture must be positive, got {box.size}.")
        if (center - half < 0).any() or (center + half > room).any():
            raise ValueError(f"{box} sticks out of the room of {tuple(map(float, room))} metres.")
        items.append(box)
    scene = Element("scene", version="2.1.0")
    for material in sorted({item.material for item in items}):
        surface = SubElement(scene, "bsdf", type="itu-radio-material", id=material)
        SubElement(surface, "string", name="type", value=material)
        SubElement(surface, "float", name="thickness", value=str(_THICKNESS))
    for i, item in enumerate(items):
        shape = SubElement(scene, "shape", type="cube", id=f"box{i}")
        place = SubElement(shape, "transform", name="to_world")
        for step, values in (
            ("scale", [float(length) / 2 for length in item.size]),
            ("translate", [float(x) for x in item.center]),
        ):
            SubElement(place, step, {k: str(v) for k, v in zip("xyz", values, strict=True)})
        SubElement(shape, "boolean", name="face_normals", value="true")
        SubElement(shape, "ref", id=item.material, name="bsdf")
    return tostring(scene, encoding="unicode")


class SionnaScene:
    """A scene of Sionna RT with one transmitter.

    Antennas are isotropic with vertical polarization. Needs ``sionna-rt`` and, on a CPU, the shared
    library of LLVM 15 or newer.

    Parameters
    ----------
    scene : str
        Name of a scene that Sionna ships ("box", "simple_reflector", ...), a path to a scene file,
        or the XML text of a scene, such as :func:`furnished_room` writes.
    tx : sequence of 3 floats
        Position of the transmitter, metres.
    frequency : float
        Hertz.
    max_order : int, default 2
        Largest number of reflections.
    material : str, optional
        Radio material to give to all objects, for example "metal" or "concrete".
    conductivity : float, optional
        Conductivity of that material in S/m, for comparisons with perfect conductors.
    samples : int, default 10_000
        Rays that look for candidates; more change nothing in a room.
    """

    def __init__(
        self,
        scene: str = "box",
        tx: Sequence[float] = (0.0, 0.0, 1.0),
        *,
        frequency: float,
        max_order: int = 2,
        material: str | None = None,
        conductivity: float | None = None,
        samples: int = 10_000,
    ) -> None:
        self.frequency = check_frequency(frequency)
        try:
            import sionna.rt as rt
        except ImportError as error:
            raise ImportError(
                "SionnaScene needs the package sionna-rt and the library LLVM: "
                "pip install 'icml24[rt]'."
            ) from error
        self._rt, self.max_order, self.samples = rt, max_order, samples
        if scene.lstrip().startswith("<"):
            self.scene = rt.load_scene_from_string(scene)
        else:
            self.scene = rt.load_scene(getattr(rt.scene, scene, scene))
        self.scene.frequency = self.frequency
        if material is not None:
            surface = rt.ITURadioMaterial("walls", material, thickness=0.1)
            if conductivity is not None:
                surface = rt.RadioMaterial(
                    "walls", relative_permittivity=1.0, conductivity=conductivity, thickness=0.1
                )
            for item in self.scene.objects.values():
                item.radio_material = surface
        array = rt.PlanarArray(num_rows=1, num_cols=1, pattern="iso", polarization="V")
        self.scene.tx_array = self.scene.rx_array = array
        self.scene.add(rt.Transmitter("tx", position=list(map(float, tx))))

    def trace(self, rx: ArrayLike) -> Paths:
        """Find all specular paths to the receivers.

        Parameters
        ----------
        rx : array_like, shape (n, 3)

        Returns
        -------
        Paths
            ``images`` holds the apparent sources of the first receiver, ``rx + length * doa``.
        """
        positions = check_positions(rx, dim=3)
        for name in list(self.scene.receivers):
            self.scene.remove(name)
        for i, place in enumerate(positions):
            self.scene.add(self._rt.Receiver(f"rx{i}", position=place.tolist()))
        solved = self._rt.PathSolver()(
            self.scene,
            max_depth=self.max_order,
            samples_per_src=self.samples,
            refraction=False,
            diffuse_reflection=False,
        )
        n = len(positions)
        real, imag = (np.asarray(part.numpy(), float) for part in solved.a)
        delay = np.asarray(solved.tau.numpy(), float).reshape(n, -1)
        turn = np.exp(-2j * np.pi * self.frequency * delay)  # the coefficients leave it out
        gain = (real + 1j * imag).reshape(n, -1) * turn
        theta = np.asarray(solved.theta_r.numpy(), float).reshape(n, -1)
        phi = np.asarray(solved.phi_r.numpy(), float).reshape(n, -1)
        mask = (delay > 0) & (np.abs(gain) > 0)
        doa = _unit(theta, phi)
        lengths = np.where(mask, delay, 0) * SPEED_OF_LIGHT
        images = positions[0] + lengths[0][:, None] * doa[0]
        return Paths(lengths, doa, np.where(mask, gain, 0), mask, images)

    def channel(self, rx: ArrayLike) -> Any:
        """Return the complex channel of each receiver."""
        return self.trace(rx).gain.sum(axis=1)


def _unit(theta: Array, phi: Array) -> Array:
    """Return unit vectors from polar angle and azimuth."""
    return np.stack(
        [np.sin(theta) * np.cos(phi), np.sin(theta) * np.sin(phi), np.cos(theta)], axis=-1
    )
