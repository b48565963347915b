"""Computes the least time that the hardware needs for a workload."""

from itertools import islice
from time import perf_counter
from typing import Any, NamedTuple

from nanovllm.benchmarks.requests import Request
from nanovllm.config import Config

SECONDS = 2.0  # how long a load runs before its rate is measured: within a second, a heavy load lowers a GPU's clocks
Steps = list[tuple[float, float]]  # seconds of reading and seconds of multiplying, for each step


class Rates(NamedTuple):
    """The rates that a GPU sustains. `times(n)` returns the combined rates of n ranks."""

    bytes_per_s: float
    operations_per_s: float  # of GEMMs in bf16; FP8 units are twice as fast

    def times(self, num_ranks: int) -> "Rates":
        return Rates(*(num_ranks * rate for rate in self))


class Limits(NamedTuple):
    """The shortest times that a run can take, in seconds.

    stepwise: assumes that each step either computes prompts or decodes, and that a step reads while it multiplies.
    overlap: assumes that all reading of the run overlaps with all multiplying of the run.
    """

    stepwise: float
    overlap: float


def measured_rates(device: str) -> Rates:
    import torch

    def seconds(function) -> float:
        """Return the duration of one call in seconds, while the GPU is under load."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        loaded = perf_counter() + SECONDS
        while perf_counter() < loaded:
            begin.record()
            for _ in range(20):
                function()
            end.record()
            end.synchronize()
        return begin.elapsed_time(end) / 20 / 1000

    size = 8192
    torch.cuda.set_device(torch.device(device).index or 0)
    large = torch.ones(2**31 // 4, device="cuda")
    square = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    return Rates(large.nbytes / seconds(large.sum), 2 * size**3 / seconds(lambda: square @ square))


def limits(requests: list[Request], config: Config, rates: Rates) -> Limits:
    """Return the limits of a run in which all requests arrive at the same time."""
    steps = [step for part in least_steps(requests, config, rates) for step in part]
    return Limits(sum(map(max, steps)), max(map(sum, zip(*steps))))


def least_steps(requests: list[Request], config: Config, rates: Rates) -> tuple[Steps, Steps]:
    """Return the reading and multiplying time of each step: a list for prompt steps, and a list for decode steps.

    All requests are assumed to arrive at the same time, and to start in order. A request starts as soon as fewer than
    `max_num_seqs` requests are running.
    """
    costs, waiting = StepCosts(config, rates), iter(requests)
    running: list[list[int]] = []  # for each sequence: its number of tokens, and how many tokens are left to generate
    prompts: Steps = []
    decodes: Steps = []
    while True:
        if new := [*islice(waiting, config.max_num_seqs - len(running))]:
            prompts.append(costs.of_prompts([len(request.prompt) for request in new]))
            running += [[len(request.prompt) + 1, request.max_tokens - 1] for request in new]
        running = [sequence for sequence in running if sequence[1]]
        if running:
            decodes.append(costs.of_decodes(len(running), sum(length for length, _ in running)))
            running = [[length + 1, num_left - 1] for length, num_left in running]
        elif not new:
            return prompts, decodes


class StepCosts:
    """Computes how many seconds a step spends on reading, and how many on multiplying."""

    def __init__(self, config: Config, rates: Rates):
        shape: Any = config.model_config
        self.shape, self.rates, self.max_num_tokens = shape, rates, config.max_num_batched_tokens
        # the weights by which a token is multiplied
        self.weights = shape.layer_operations // 2 * shape.num_hidden_layers
        self.head_weights = shape.hidden_size * shape.vocab_size
        self.head_size = config.dtype.itemsize
        self.weight_size = self.attention_size = shape.quantization.bits / 8 if shape.quantization else self.head_size
        if shape.quantization and shape.quantization.scheme_of("model.layers.0.self_attn.q_proj") is None:
            self.attention_size = self.head_size
        num_heads = shape.num_attention_heads + shape.num_key_value_heads
        self.attention_weights = 2 * shape.hidden_size * num_heads * shape.head_dim * shape.num_hidden_layers
        # FP8 units multiply twice as fast
        self.speed_up = 2 if shape.quantization and shape.quantization.dtype.is_floating_point else 1
        head_bytes = shape.head_dim + 2 if config.kv_cache_dtype == "fp8" else shape.head_dim * self.head_size
        num_attention_layers = round(shape.num_hidden_layers * shape.attention_fraction)
        self.kv_bytes = 2 * num_attention_layers * shape.num_key_value_heads * head_bytes  # bytes of a token
        # operations of a query and a key: the dot product, and the sum of values
        self.attention = 4 * shape.num_attention_heads * shape.head_dim * num_attention_layers
        # bytes of a sequence's state; a token takes 7 operations per element of the state: the decay, the product with
        # the key, the correction, and the product with the query
        self.state_bytes = shape.hybrid.state_bytes(self.head_size) if shape.hybrid else 0
        self.rule = 7 * self.state_bytes // 4

    def of_prompts(self, lengths: list[int]) -> tuple[float, float]:
        num_tokens = sum(lengths)
        num_steps = -(-num_tokens // self.max_num_tokens)
        num_pairs = sum(length**2 for length in lengths) / 2
        num_bytes = num_steps * self._weight_bytes(num_tokens / num_steps) + len(lengths) * self.state_bytes
        return self._seconds(num_tokens, len(lengths), num_bytes, num_pairs)

    def of_decodes(self, num_seqs: int, num_keys: int) -> tuple[float, float]:
        num_bytes = self._weight_bytes(num_seqs) + num_keys * self.kv_bytes
        num_bytes += 2 * num_seqs * self.state_bytes  # states are read and written
        return self._seconds(num_seqs, num_seqs, num_bytes, num_keys)

    def _seconds(self, num_tokens: int, num_sampled: int, num_bytes: float, num_pairs: float) -> tuple[float, float]:
        linear = 2 * num_tokens * self.weights / self.speed_up + 2 * num_sampled * self.head_weights
        operations = linear + num_pairs * self.attention + num_tokens * self.rule
        return num_bytes / self.rates.bytes_per_s, operations / self.rates.operations_per_s

    def _weight_bytes(self, num_tokens: float) -> float:
        """Return the number of bytes of weights that a step reads.

        For a mixture of experts, the result is the expected number if all experts are equally likely to be chosen.
        """
        num_weights: float = self.weights
        if moe := self.shape.moe:
            is_read = 1 - (1 - moe.top_k / moe.num_experts) ** num_tokens
            num_more_experts = moe.num_experts * is_read - moe.top_k  # compared with a single token
            num_weights += (
                max(0, num_more_experts) * 3 * self.shape.hidden_size * moe.intermediate_size * len(moe.layers)
            )
        others = self.attention_weights * (self.attention_size - self.weight_size) + self.head_weights * self.head_size
        return num_weights * self.weight_size + others
