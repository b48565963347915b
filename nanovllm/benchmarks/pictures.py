"""Draws results as svg files, with matplotlib."""

import json
from pathlib import Path

from nanovllm.benchmarks.results import Results
from nanovllm.benchmarks.tables import Panel
from nanovllm.benchmarks.throughput import WORKLOADS

# names in results files -> names in the pictures; `--compare` can't run "original"
LABELS = dict(nanovllm="this package", vllm="vLLM", original="the original nano-vllm", transformers="transformers")
# statistics without a style are only in tables
LINE_STYLES = {"": "-", "p50": "-", "p99": "--", "median": "-", "1 sequence": "-", "8 sequences": "--"}
MARKERS = {"nanovllm": "o", "vllm": "s", "transformers": "^"}  # they tell engines apart without colours
LINE_COLORS = {"nanovllm": "#1a7f5a", "vllm": "#7b8a97", "transformers": "#c08a3e"}


def svg_pyplot():
    """Return `matplotlib.pyplot` with settings for small and reproducible svg files, in which text stays text."""
    import matplotlib

    matplotlib.use("svg")
    settings = {"svg.fonttype": "none", "svg.hashsalt": "nano-vllm", "font.size": 9, "legend.frameon": False}
    matplotlib.rcParams.update(settings | {"axes.spines.top": False, "axes.spines.right": False})
    import matplotlib.pyplot

    return matplotlib.pyplot


def draw_figure(file: Path) -> None:
    """Draw a bar chart of the results in the JSON file next to `file`.

    If the file contains results of vLLM, the bars show speeds relative to vLLM, and the labels show tokens per second.
    """
    plt = svg_pyplot()
    saved = json.loads(file.with_suffix(".json").read_text())
    groups = [(setup, *item) for setup, workloads in saved["results"].items() for item in workloads.items()]
    engines = [engine for engine in LABELS if any(engine in rates for _, _, rates in groups)]
    baseline = "vllm" if "vllm" in engines else engines[-1]
    height = 0.8 / len(engines)
    figure, axes = plt.subplots(figsize=(8, 1 + len(groups) * (0.1 + 0.15 * len(engines))), layout="constrained")
    for i, engine in enumerate(engines):
        measured = [(k, rates) for k, (_, _, rates) in enumerate(groups) if engine in rates]
        relative = [rates[engine] / rates.get(baseline, rates["nanovllm"]) for _, rates in measured]
        rows = [k + (i - (len(engines) - 1) / 2) * height for k, _ in measured]
        color = ("#1a7f5a", "#b8c4ce", "#dde3e8", "#eeeeee")[i]
        bars = axes.barh(rows, relative, 0.92 * height, label=LABELS[engine], color=color)
        axes.bar_label(bars, [f"{rates[engine]:,}" for _, rates in measured], padding=3)
    axes.set_yticks(range(len(groups)), [f"{setup}, {WORKLOADS[workload]}" for setup, workload, _ in groups])
    axes.invert_yaxis()
    axes.set_xlabel(f"speed relative to {LABELS[baseline]}; labels are tokens per second\n{saved['notes']}")
    figure.legend(loc="outside upper center", ncols=len(engines))
    figure.savefig(file, metadata={"Date": None})


def draw_panels(file: Path, title: str, panels: list[Panel], results: Results) -> None:
    """Draw the curves of all panels. Each engine has a colour and a marker, and dashed curves have hollow markers."""
    drawn = [panel for panel in panels if panel.is_drawn and any(panel.points(results).values())]
    if not drawn:  # Ctrl-C has ended the run early
        return
    plt = svg_pyplot()
    from matplotlib.ticker import LogLocator

    size = (max(4.5, 3.2 * len(drawn)), 3)
    figure, (all_axes,) = plt.subplots(1, len(drawn), figsize=size, layout="constrained", squeeze=False)
    labels: list[str] = []
    for panel, axes in zip(drawn, all_axes):
        for (engine, statistic), points in panel.points(results).items():
            if statistic in LINE_STYLES:
                style = dict(linestyle=LINE_STYLES[statistic], color=LINE_COLORS[engine], marker=MARKERS[engine])
                style |= dict(markersize=4, markerfacecolor="white" if style["linestyle"] == "--" else None)
                label = ", ".join(filter(None, [LABELS[engine], statistic]))
                axes.plot(list(points), list(points.values()), label=label, **style)
                axes.set_xscale("log" if "x" in panel.log else "linear")
                axes.set_xticks(list(points), [f"{x:,g}" for x in points], rotation=45 if panel.log else 0)
        if "y" in panel.log:
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        else:
            axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter("{x:,g}")
        axes.minorticks_off()
        axes.set_title(panel.title, fontsize=9)
        axes.set_xlabel(panel.xlabel)
        axes.grid(alpha=0.25)
        if labels != (labels := axes.get_legend_handles_labels()[1]):  # once for panels with the same legend
            axes.legend(fontsize=8)
    figure.suptitle(title, fontsize=9)
    figure.savefig(file, metadata={"Date": None})
    plt.close(figure)
