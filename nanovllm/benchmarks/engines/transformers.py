"""Runs workloads on transformers, in padded batches."""

from time import perf_counter

from nanovllm.benchmarks.engines.loops import measure
from nanovllm.benchmarks.requests import TEMPERATURE, Request, Workloads
from nanovllm.benchmarks.results import Result, fastest
from nanovllm.config import Config


def run_transformers(model: str, settings: dict, workloads: Workloads) -> dict[str, Result]:
    """Run padded batches of three sizes and, on a CPU, with two dtypes. Return the fastest result."""
    import torch
    from transformers import AutoModelForCausalLM, StoppingCriteria

    config = Config.create(model, settings)
    any_dtype = config.device == "cpu" and settings.get("dtype", "auto") == "auto"
    dtypes = [torch.float32, torch.bfloat16] if any_dtype else [config.dtype]
    llm = AutoModelForCausalLM.from_pretrained(config.model).to(config.device).eval()
    llm.generation_config.eos_token_id = None

    class Clock(StoppingCriteria):
        """A stopping criterion that records when each token arrives, and never stops the generation."""

        def __init__(self, begin: float):
            self.begin, self.times = begin, []

        def __call__(self, input_ids, scores, **kwargs):
            if input_ids.is_cuda:
                torch.cuda.synchronize()
            self.times.append(perf_counter() - self.begin)
            return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    def run_batches(requests: list[Request], batch_size: int) -> Result:
        result = Result(note=f"batches of {batch_size}, {str(llm.dtype).removeprefix('torch.')}")
        begin = perf_counter()
        for i in range(0, len(requests), batch_size):
            batch = requests[i : i + batch_size]
            longest = max(len(r.prompt) for r in batch)
            ids = torch.tensor([[0] * (longest - len(r.prompt)) + r.prompt for r in batch], device=llm.device)
            mask = torch.tensor([[0] * (longest - len(r.prompt)) + [1] * len(r.prompt) for r in batch])
            clock = Clock(begin)
            sampling = dict(do_sample=True, temperature=TEMPERATURE, top_k=batch[0].top_k, top_p=batch[0].top_p)
            bounds = dict(max_new_tokens=max(r.max_tokens for r in batch), stopping_criteria=[clock])
            llm.generate(ids, attention_mask=mask.to(llm.device), pad_token_id=0, **sampling, **bounds)
            result.token_times += [clock.times[: r.max_tokens] for r in batch]
        result.seconds = perf_counter() - begin
        return result

    def run(requests: list[Request]) -> Result:
        results = []
        for dtype in dtypes:
            llm.to(dtype)
            sizes = sorted({min(size, len(requests)) for size in (16, 64, 256)})
            results += [run_batches(requests, size) for size in sizes]
        return fastest(results)

    return measure("transformers", run, workloads, fastest)
