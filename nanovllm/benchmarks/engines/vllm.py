"""Runs workloads on vLLM, with `generate` or with the steps of its engine."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from typing import Any

from nanovllm.benchmarks.engines.loops import measure, serve
from nanovllm.benchmarks.requests import Request, Workloads
from nanovllm.benchmarks.results import Result, drafts_since, fastest, joined
from nanovllm.config import Config

# settings that vLLM gets if they are given; otherwise, it has its own defaults
IF_GIVEN = "max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization"
IF_GIVEN += "limit_mm_per_prompt", "mm_processor_kwargs"
# the keys of our `speculative_config` that have the same meaning in vLLM
OF_DRAFTS = "method", "num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max", "model", "revision"
OF_DRAFTS += "draft_tensor_parallel_size", "synthetic_acceptance_rates"


def vllm_settings(model: str, settings: dict) -> dict:
    """Return arguments for vLLM: model, dtypes, maximum length, number of ranks, load format, host memory and drafts.

    vLLM also gets the settings that IF_GIVEN lists, if `settings` contains them. If this package loads no vision tower,
    vLLM loads none either. All other arguments have vLLM's defaults.
    """
    config = Config.create(model, settings)
    names = ["model", "max_model_len", "tensor_parallel_size", "load_format", "quantization", "kv_cache_dtype"]
    names += [name for name in IF_GIVEN if name in settings]
    arguments = {"dtype": str(config.dtype).removeprefix("torch."), **{name: getattr(config, name) for name in names}}
    if config.model_config.vision is None:
        arguments["language_model_only"] = True
    if config.task != "generate":
        arguments["runner"] = "pooling"
    if config.swap_space:
        arguments["kv_offloading_size"] = config.swap_space
    if (drafting := config.speculative_config) is not None:
        arguments["speculative_config"] = speculation(drafting)
        if drafting.method == "eagle3" and config.load_format == "dummy":
            arguments["worker_cls"] = "nanovllm.benchmarks.engines.vllm_worker.WorkerWithHead"
    return arguments


def speculation(settings: Any) -> dict[str, Any]:
    """Translate our resolved `speculative_config` for vLLM, which drafts tokens even if drafting saves no time."""
    names = [name for name in OF_DRAFTS if getattr(settings, name) is not None]
    if settings.method == "suffix":
        names += [name for name in settings.__dataclass_fields__ if name.startswith("suffix_")]
    method = {"rejection_sample_method": "synthetic"} if settings.is_synthetic else {}
    return {name: getattr(settings, name) for name in names} | method


@contextmanager
def ending(engine: Any) -> Iterator[None]:
    """End vLLM's process when the `with` block ends, because vLLM 0.33 never ends this process by itself."""
    try:
        yield
    finally:
        engine.engine_core.shutdown()


def run_vllm(model: str, settings: dict, workloads: Workloads) -> dict[str, Result]:
    """Run workloads with vLLM's offline `LLM`, which does not report when tokens arrive."""
    from vllm import LLM, SamplingParams

    arguments = vllm_settings(model, settings)
    drafts = "speculative_config" in arguments
    llm = LLM(**arguments, disable_log_stats=not drafts)  # vLLM counts drafts only if it logs stats

    def counts() -> dict[str, Any]:
        """Return counts of drafts, in the format of our `LLM.stats()["spec_decode"]`."""
        metrics = {x.name.removeprefix("vllm:spec_decode_num_"): x for x in llm.get_metrics()}
        values = {name: metrics[name].value for name in ("drafts", "draft_tokens", "accepted_tokens")}
        return values | {"accepted_per_position": metrics["accepted_tokens_per_pos"].values}

    def run(requests: list[Request]) -> Result:
        params = [SamplingParams(**r.sampling_settings(), detokenize=False) for r in requests]
        prompts, show = [r.as_prompt() for r in requests], sys.stderr.isatty()
        before, begin = counts() if drafts else None, perf_counter()
        if "runner" in arguments:
            llm.embed(prompts, use_tqdm=show)
        else:
            llm.generate(prompts, params, use_tqdm=show)
        seconds = perf_counter() - begin
        return Result(seconds, note=drafts_since(before, counts() if drafts else None))

    with ending(llm.llm_engine):
        return measure("vllm", run, workloads, fastest)


class VllmSteps:
    def __init__(self, engine):
        self.engine, self.num_requests, self.num_cached_tokens = engine, 0, 0

    def params(self, request: Request):
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        # DELTA: each output has only new tokens
        return SamplingParams(**request.sampling_settings(), detokenize=False, output_kind=RequestOutputKind.DELTA)

    def add(self, prompt: list[int], params) -> int:
        request_id, self.num_requests = self.num_requests, self.num_requests + 1
        self.engine.add_request(str(request_id), {"prompt_token_ids": prompt}, params)
        return request_id

    def step(self) -> list[tuple[int, int]]:
        outputs = self.engine.step()
        self.num_cached_tokens += sum(output.num_cached_tokens or 0 for output in outputs if output.finished)
        # vLLM may append a dash and a suffix to the id
        ids = [int(output.request_id.split("-")[0]) for output in outputs]
        return [(i, token_id) for i, output in zip(ids, outputs) for token_id in output.outputs[0].token_ids]

    def is_finished(self) -> bool:
        return not self.engine.has_unfinished_requests()


def step_vllm(model: str, settings: dict, workloads: Workloads) -> dict[str, Result]:
    """Run workloads with vLLM's `LLMEngine` in a separate process, with the defaults of vLLM's server."""
    from vllm import EngineArgs, LLMEngine
    from vllm.usage.usage_lib import UsageContext

    arguments = EngineArgs(**vllm_settings(model, settings), disable_log_stats=True)
    # without this argument, an engine has other bounds: on an H200, 2,048 tokens per step instead of the server's 8,192
    engine = LLMEngine.from_engine_args(arguments, usage_context=UsageContext.OPENAI_API_SERVER)
    with ending(engine):
        return measure("vllm", partial(serve, VllmSteps(engine)), workloads, joined)
