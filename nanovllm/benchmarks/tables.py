"""Prints tables to standard output."""

from collections.abc import Callable
from dataclasses import dataclass
from math import isnan, nan

from nanovllm.benchmarks.results import Result, Results


def print_table(title: str, header: list[str], rows: list[list[str]]) -> None:
    """Print a table. The first column and columns without a header are left-aligned, all others right-aligned."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    print(f"\n{title}")
    for row in [header, *rows]:
        left = [i == 0 or not name for i, name in enumerate(header)]
        cells = [cell.ljust(width) if is_left else cell.rjust(width) for cell, width, is_left in zip(row, widths, left)]
        print("  ".join(cells).rstrip())


def number(value: float, digits: int) -> str:
    return "-" if isnan(value) else f"{value:,.{digits}f}"


@dataclass
class Panel:
    """A quantity y as a function of a variable x. A panel is one table, and one part of a picture.

    curves: maps each statistic to a pair. The first element of the pair maps each x to the name of a workload. The
        second element computes y from the workload's result.
    log: which axes are logarithmic: "", "x", "y" or "xy".
    digits: the number of decimal places of y in the table.
    """

    title: str
    xlabel: str
    curves: dict[str, tuple[dict[float, str], Callable[[Result], float]]]
    log: str = ""
    digits: int = 2
    is_drawn: bool = True

    def points(self, results: Results) -> dict[tuple[str, str], dict[float, float]]:
        """Return a dict for each engine and statistic, which maps each x that has a result to y."""
        return {
            (engine, statistic): {x: value(by_workload[name]) for x, name in names.items() if name in by_workload}
            for engine, by_workload in results.items()
            for statistic, (names, value) in self.curves.items()
        }

    def print(self, results: Results) -> None:
        """Print the table if there are results. (After an early Ctrl-C, there are none.)"""
        points = {names: curve for names, curve in self.points(results).items() if curve}
        if not points:
            return
        xs = next(iter(self.curves.values()))[0]
        rows = [[f"{x:,g}", *(number(curve.get(x, nan), self.digits) for curve in points.values())] for x in xs]
        print_table(self.title, [self.xlabel, *(" ".join(names).strip() for names in points)], rows)
