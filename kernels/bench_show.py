# SPDX-License-Identifier: Apache-2.0
"""Output of the benchmark as a table, a JSON file and a plot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

COLUMNS = ("kernel", "by", "layout", "dtype", "tokens", "MB", "ms", "GB/s", "of copy", "launches")


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """Return a row of the table."""
    launches = "" if row["launches"] is None else f"{row['launches']:.1f}"
    return (
        row["kernel"],
        row["by"],
        row["layout"],
        row["dtype"],
        str(row["tokens"]),
        f"{row['mbytes']:.0f}",
        f"{row['seconds'] * 1e3:.3f}",
        f"{row['gbps']:.1f}",
        f"{row['ratio']:.2f}",
        launches,
    )


def heading(about: dict[str, Any]) -> str:
    """Return the hardware, software versions and date of the measurement in a line."""
    triton = f"Triton {about['triton']}" if about["triton"] else "no Triton"
    threads = f", {about['threads']} threads" if str(about["device"]).startswith("CPU") else ""
    hardware = f"{about['device']} ({about['capability']}){threads}"
    return f"{hardware}, torch {about['torch']}, {triton}, {about['date']}"


def table(rows: list[dict[str, Any]], about: dict[str, Any], notes: list[str]) -> None:
    """Print the measurements; with rich where it is installed."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(heading(about))
        for line in (COLUMNS, *map(cells, rows)):
            print("  ".join(f"{cell:>10}" for cell in line))
    else:
        shown = Table(*COLUMNS, title=heading(about))
        for row in rows:
            shown.add_row(*cells(row))
        Console(width=160).print(shown)
    for note in notes:
        print(f"not measured: {note}")


def save(name: str, rows: list[dict[str, Any]], about: dict[str, Any], notes: list[str]) -> None:
    """Write the measurements to a JSON file."""
    Path(name).write_text(
        json.dumps({"about": about, "notes": notes, "rows": rows}, indent=1) + "\n",
        encoding="utf-8",
    )


def plot(name: str, rows: list[dict[str, Any]], about: dict[str, Any]) -> None:
    """Draw the ratio over tokens, a panel per kernel, a line per layout and implementation.

    Without matplotlib, print a line that says so instead.
    """
    try:
        import matplotlib as mpl

        mpl.use("svg")
        import matplotlib.pyplot as plt
    except ImportError:
        print("no plot: matplotlib is not installed (pip install matplotlib)")
        return
    mpl.rcParams["svg.hashsalt"] = "kvconform"
    kernels = list(dict.fromkeys(row["kernel"] for row in rows if row["kernel"] != "copy"))
    figure, panels = plt.subplots(
        1, len(kernels), figsize=(3.2 * len(kernels), 3.6), sharey=True, squeeze=False
    )
    for panel, kernel in zip(panels[0], kernels, strict=True):
        lines: dict[str, list[tuple[int, float]]] = {}
        for row in rows:
            if row["kernel"] == kernel:
                kind = "" if row["by"] in ("torch", "triton") else f", {row['by']}"
                lines.setdefault(f"{row['layout']}{kind}", []).append((row["tokens"], row["ratio"]))
        for label, points in lines.items():
            panel.plot(
                *zip(*sorted(points), strict=True),
                marker="o",
                markersize=3,
                linewidth=1,
                label=label,
            )
        panel.axhline(1.0, color="black", linewidth=0.6)
        panel.set_xscale("log", base=2)
        panel.set_title(kernel, fontsize=9)
        panel.set_xlabel("tokens", fontsize=8)
        panel.tick_params(labelsize=7)
        panel.legend(fontsize=5)
    panels[0][0].set_ylabel("of the speed of a copy", fontsize=8)
    panels[0][0].set_ylim(bottom=0)
    figure.suptitle(heading(about), fontsize=8)
    figure.tight_layout()
    figure.savefig(name, format="svg", metadata={"Date": None})
    print(f"plot: {name}")
