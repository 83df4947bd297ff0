"""Mazes as grids of cells, shortest routes through them, and a controller that knows the map.

Real: the maps are those of the PointMaze and AntMaze environments. The controller only makes the
logged data; no learnt agent sees the map.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["MAPS", "Maze", "WaypointController"]

Array = np.ndarray[Any, np.dtype[Any]]
Cell = tuple[int, int]

#: "#" is a wall. The three maps of the PointMaze environments.
MAPS = {
    "umaze": ["#####", "#...#", "###.#", "#...#", "#####"],
    "medium": [
        "########",
        "#..##..#",
        "#..#...#",
        "##...###",
        "#..#...#",
        "#.#..#.#",
        "#...#..#",
        "########",
    ],
    "large": [
        "############",
        "#....#.....#",
        "#.##.#.#.#.#",
        "#......#...#",
        "#.####.###.#",
        "#..#.#.....#",
        "##.#.#.#.###",
        "#..#...#...#",
        "############",
    ],
}


class Maze:
    """A grid of free cells and walls, one metre wide, centred at the origin.

    Parameters
    ----------
    layout : str or sequence of str
        ``"umaze"``, ``"medium"``, ``"large"``, or the rows of a map in which ``#`` is a wall and
        ``.`` is free. The border must be walls.

    Attributes
    ----------
    walls : numpy.ndarray of bool, shape (rows, columns)
    cells : list of (row, column)
        The free cells.
    distances : numpy.ndarray, shape (n_cells, n_cells)
        Steps between free cells on the shortest route; ``inf`` where there is none.

    Examples
    --------
    >>> maze = Maze("umaze")
    >>> maze.distance((1, 1), (3, 1))
    6
    >>> maze.position((1, 1)).tolist(), maze.cell_of([-1.0, 1.0])
    ([-1.0, 1.0], (1, 1))
    """

    def __init__(self, layout: str | Sequence[str]) -> None:
        if isinstance(layout, str) and layout not in MAPS:
            raise ValueError(f"layout must be one of {', '.join(MAPS)} or rows, got {layout!r}.")
        rows = list(MAPS[layout] if isinstance(layout, str) else layout)
        if not rows or len({len(row) for row in rows}) != 1 or set("".join(rows)) - set("#."):
            raise ValueError("A map needs rows of equal length made of '#' (wall) and '.' (free).")
        self.walls: Array = np.array([[mark == "#" for mark in row] for row in rows])
        border = np.pad(np.zeros(np.array(self.walls.shape) - 2, bool), 1, constant_values=True)
        if not self.walls[border].all() or self.walls.all():
            raise ValueError("A map needs walls all around and at least one free cell inside.")
        self.cells: list[Cell] = [(int(r), int(c)) for r, c in np.argwhere(~self.walls)]
        self._index = {cell: i for i, cell in enumerate(self.cells)}
        self.distances = self._all_distances()

    def _all_distances(self) -> Array:
        places = np.array(self.cells)
        near = np.abs(places[:, None] - places[None]).sum(-1) == 1
        found = np.where(np.eye(len(places), dtype=bool), 0.0, np.inf)
        front = np.eye(len(places), dtype=bool)
        for step in range(1, len(places)):
            front = (front @ near) & np.isinf(found)
            if not front.any():
                break
            found[front] = step
        return found

    def index(self, cell: Cell) -> int:
        """Return the number of a free cell in ``cells``."""
        cell = (int(cell[0]), int(cell[1]))
        if cell not in self._index:
            raise ValueError(f"{cell} is no free cell of this maze; free cells are in maze.cells.")
        return self._index[cell]

    def position(self, cell: Cell) -> Array:
        """Return the centre (x, y) of a cell, metres."""
        rows, columns = self.walls.shape
        return np.array([cell[1] + 0.5 - columns / 2, rows / 2 - cell[0] - 0.5])

    def cell_of(self, position: Any) -> Cell:
        """Return the (row, column) in which a point lies."""
        rows, columns = self.walls.shape
        x, y = np.asarray(position, dtype=float)
        return int(np.floor(rows / 2 - y)), int(np.floor(x + columns / 2))

    def is_free(self, positions: Any) -> Array:
        """Tell for each point (x, y) whether it lies in a free cell.

        Examples
        --------
        >>> Maze("umaze").is_free([[-1.0, 1.0], [0.0, 0.0]]).tolist()
        [True, False]
        """
        rows, columns = self.walls.shape
        x, y = np.asarray(positions, dtype=float).T
        row = np.floor(rows / 2 - y).astype(int).clip(0, rows - 1)
        column = np.floor(x + columns / 2).astype(int).clip(0, columns - 1)
        free: Array = ~self.walls[row, column]
        return free

    def distance(self, start: Cell, goal: Cell) -> int:
        """Return the number of steps from cell to cell on the shortest route."""
        steps = self.distances[self.index(start), self.index(goal)]
        if np.isinf(steps):
            raise ValueError(f"No route leads from {tuple(start)} to {tuple(goal)}.")
        return int(steps)

    def routes(self, length: int) -> list[tuple[Cell, Cell]]:
        """List all pairs (start, goal) that are ``length`` steps apart.

        Examples
        --------
        >>> Maze("medium").routes(10)[:2]
        [((1, 1), (6, 6)), ((1, 2), (6, 5))]
        """
        pairs = np.argwhere(self.distances == length)
        return [(self.cells[i], self.cells[j]) for i, j in pairs]

    def next_cells(self) -> Array:
        """Return the table of the next cell on the shortest route, shape (n_cells, n_cells)."""
        places = np.array(self.cells)
        near = np.abs(places[:, None] - places[None]).sum(-1) == 1
        costs = np.where(near[:, :, None], self.distances[None], np.inf)
        step: Array = costs.argmin(1)
        np.fill_diagonal(step, np.arange(len(places)))
        return step


class WaypointController:
    """Follow the shortest route from cell to cell with a proportional-derivative law.

    Parameters
    ----------
    maze : Maze
    kp, kd : float
        Force for each metre of distance to the next waypoint, and for each metre per second.

    Examples
    --------
    >>> control = WaypointController(Maze("umaze"))
    >>> control.act([[-1.0, 1.0, 0.0, 0.0]], [[-1.0, -1.0]]).tolist()
    [[1.0, 0.0]]
    """

    def __init__(self, maze: Maze, kp: float = 4.0, kd: float = 1.2) -> None:
        self.maze, self.kp, self.kd = maze, float(kp), float(kd)
        self._next = maze.next_cells()
        self._centres = np.array([maze.position(cell) for cell in maze.cells])
        self._number = np.full(maze.walls.shape, -1)
        self._number[tuple(np.array(maze.cells).T)] = np.arange(len(maze.cells))

    def nearest_cell(self, positions: Any) -> Array:
        """Return the number of the free cell whose centre is nearest to each point."""
        gaps = np.asarray(positions)[:, None] - self._centres[None]
        nearest: Array = (gaps**2).sum(-1).argmin(1)
        return nearest

    def towards(self, observations: Any, waypoints: Any) -> Array:
        """Return the force that moves to a point in sight, clipped to [-1, 1]."""
        x = np.asarray(observations, dtype=float)
        force = self.kp * (np.asarray(waypoints) - x[:, :2]) - self.kd * x[:, 2:4]
        return np.clip(force, -1.0, 1.0)

    def act(self, observations: Any, goals: Any) -> Array:
        """Return the force for observations (x, y, and their velocities) and goals (x, y)."""
        return self.towards(observations, self.waypoint(observations, goals))

    def waypoint(self, observations: Any, goals: Any, ahead: int = 1) -> Array:
        """Return the centre of the cell ``ahead`` cells on along the shortest route, or the goal.

        Parameters
        ----------
        observations : array_like, shape (n, 2) or more columns
        goals : array_like, shape (n, 2)
        ahead : int, default 1

        Returns
        -------
        numpy.ndarray, shape (n, 2)

        Examples
        --------
        >>> control = WaypointController(Maze("umaze"))
        >>> control.waypoint([[-1.0, 1.0]], [[-1.0, -1.0]], ahead=3).tolist()
        [[1.0, 0.0]]
        """
        x, goals = np.asarray(observations, dtype=float), np.asarray(goals, dtype=float)
        here, there = self.nearest_cell(x[:, :2]), self.nearest_cell(goals)
        for _ in range(ahead - 1):
            here = self._next[here, there]
        return np.where((here == there)[:, None], goals, self._centres[self._next[here, there]])
