"""Implements `nanovllm bench`: reads arguments, runs measurements, and prints tables or draws pictures."""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nanovllm import SamplingParams
from nanovllm.benchmarks import engines, http, pictures, processes, shapes, sweeps, throughput
from nanovllm.benchmarks.arguments import engine_settings, make_parser, parse
from nanovllm.benchmarks.requests import TEMPERATURE, Workloads, describe
from nanovllm.benchmarks.results import Results, save_results
from nanovllm.benchmarks.tables import Panel
from nanovllm.config import Config
from nanovllm.spec_decode.speculative_config import given_values
from nanovllm.utils.libraries import import_libraries
from nanovllm.utils.model_files import check_model


def main(arguments: Sequence[str] | None = None, prog: str | None = None) -> None:
    """Run the command.

    `arguments` defaults to the command line of the process. Ctrl-C ends the process with exit status 130.
    """
    try:
        _main(arguments, prog)
    except KeyboardInterrupt:
        sys.exit(130)


def _main(arguments: Sequence[str] | None, prog: str | None) -> None:
    parser = make_parser(prog)
    args = parse(parser, arguments)
    if args.figure:
        pictures.draw_figure(args.figure)
        return
    settings = engine_settings(args)
    if not args.shape:
        try:
            check_model(args.model, settings.get("revision"))
        except (ValueError, OSError) as error:
            parser.error(str(error))
    import_libraries(settings)
    with tempfile.TemporaryDirectory() as folder:
        if args.shape:
            args.model = str(Path(folder) / args.shape)
            with_text, with_tower = args.workload == ["http"], "images" in args.workload
            shapes.write_shape(args.shape, Path(args.model), with_text, with_tower)
        processes.show_engine_log()
        try:  # before any engine is started
            if args.shape and (drafting := settings.get("speculative_config")) is not None:
                settings["speculative_config"] = shapes.with_drafter(given_values(drafting), Path(args.model))
            SamplingParams(temperature=TEMPERATURE, top_k=args.top_k, top_p=args.top_p)
            config = Config.create(args.model, settings)
        except (ValueError, TypeError, OSError) as error:
            parser.error(str(error))
        if "images" in args.workload and config.model_config.vision is None:
            parser.error(f"--workload images: {args.shape or args.model} takes no images with these settings")
        if args.profile and config.device == "cpu":
            parser.error(f"--profile {args.profile}: traces GPU kernels, but the device is a CPU")
        args.rounds = args.rounds or (1 if config.device == "cpu" else 2)
        if args.shape and config.device == "cpu":
            processes.report(f"--shape {args.shape} on a CPU: making its weights is slow, and so is each step")
        run(args, settings, config)


def run(args: argparse.Namespace, settings: dict[str, Any], config: Config) -> None:
    from nanovllm.benchmarks import calls, host, profiling  # they import PyTorch, which --help does not need

    if args.profile:
        workloads, swept, _ = requested(args, config)
        profiling.profile_workloads(args.model, settings, config, workloads | swept, args.profile)
    elif args.workload == ["host"]:
        host.measure_host(args.model, settings)
    elif args.workload == ["http"]:
        try:
            results, errors = http.compare_servers(args, settings, config)
        except RuntimeError as error:
            sys.exit(f"{error}")
        print_setup(args, config, results)
        http.print_results(results)
        if errors:
            sys.exit(f"{errors[0]}")
    elif args.beams:
        calls.compare_beam_search(args.model, settings, args.beams, args.max_output_len or 400)
    elif args.streaming:
        calls.compare_streaming(args.model, settings, throughput.headline_requests(args, config))
    else:
        compare_engines(args, settings, config)


def compare_engines(args: argparse.Namespace, settings: dict[str, Any], config: Config) -> None:
    if "online" in args.workload and config.device == "cpu" and not args.request_rate:
        args.request_rate = sweeps.rates_of_cpu(args, settings, config)
    try:
        workloads, swept, panels = requested(args, config)
    except (RuntimeError, ValueError) as error:
        sys.exit(f"{error}")
    functions = engines.STEPPED_ENGINES if args.workload[0] in sweeps.STEPPED else engines.ENGINES
    names = ["nanovllm", *args.compare]
    results, errors = engines.run_engines(names, functions, args.model, settings, workloads | swept)

    notes = print_setup(args, config, results)
    if workloads:
        throughput.print_results(config, workloads, results)
    for name, runs in swept.items():
        if name not in results["nanovllm"]:
            continue
        num_runs = results["nanovllm"][name].num_runs
        print(describe(name, [request for run in runs[-num_runs:] for request in run]))
        for engine, by_workload in results.items():
            if name in by_workload and by_workload[name].note:
                print(f"  {engine}: {by_workload[name].note}")
    sweeps.add_turns(results, swept)
    for panel in panels:
        panel.print(results)

    num_ranks = config.tensor_parallel_size
    setup = Path(args.model).name + (f" on {num_ranks} GPUs" if num_ranks > 1 else "")
    if args.plot:
        import torch

        device = "CPU" if config.device == "cpu" else torch.cuda.get_device_name(config.device)
        pictures.draw_panels(args.plot, f"{setup}, {device}", panels, results)
    if args.save:
        rates = {
            name: {engine: result[name].rate for engine, result in results.items() if name in result}
            for name in workloads
            if name in results["nanovllm"]
        }
        save_results(args.save, notes, setup, rates)
    if errors:
        raise errors[0]
    if any(result.keys() < (workloads | swept).keys() for result in results.values()):
        raise KeyboardInterrupt  # Ctrl-C ended a run early, and the exit status must say so


def requested(args: argparse.Namespace, config: Config) -> tuple[Workloads, Workloads, list[Panel]]:
    """Return the workloads of `throughput`, the workloads of `sweeps`, and the tables of `sweeps`."""
    workloads = throughput.workloads(args, config)
    swept: Workloads = {}
    panels: list[Panel] = []
    for name in args.workload:
        if name in sweeps.SWEEPS:
            runs_of_sweep, panels_of_sweep = sweeps.SWEEPS[name](args, config)
            swept |= runs_of_sweep
            panels += panels_of_sweep
    for request in (request for runs in [*workloads.values(), *swept.values()] for run in runs for request in run):
        request.top_k, request.top_p = args.top_k, args.top_p
    return workloads, swept, panels


def print_setup(args: argparse.Namespace, config: Config, results: Results) -> str:
    """Print the model, the device and the versions, and return a summary for the notes of a results file."""
    versions = engines.versions(results)
    dtypes = str(config.dtype) + ("" if config.kv_cache_dtype == "auto" else f", cache {config.kv_cache_dtype}")
    print(f"{args.shape or args.model}, {dtypes}, {config.device}, attention {config.attention_backend}")
    print(versions)
    return f"{config.device}, {dtypes}, {versions}"
