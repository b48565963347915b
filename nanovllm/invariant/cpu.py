"""Defines the model runner of a CPU rank for the setting `batch_invariant`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from nanovllm.batches.batch_runner import BatchRunner
from nanovllm.delta_net.gated_delta_net import GatedDeltaNet
from nanovllm.invariant import VARIANT, cpu_ops, invariant_operations, refuse_states
from nanovllm.invariant.cpu_attention import KEYS, QUERIES, InvariantBackend
from nanovllm.kernels import register_ops
from nanovllm.layers.attention import Attention

register_ops("cpu" + VARIANT, vars(cpu_ops))


class Runner(BatchRunner):
    """A runner that computes each row of a step as if the step contained no other row."""

    def make_backend(self) -> InvariantBackend:
        return InvariantBackend()

    def warm_up(self, part_done: Callable[[str], None]) -> None:
        refuse_states(self, GatedDeltaNet)
        super().warm_up(part_done)
        check_products(self.model, self.config.dtype)

    @contextmanager
    def on_device(self) -> Iterator[None]:
        with invariant_operations(), super().on_device(), cpu_ops.one_thread():
            yield


@torch.inference_mode()
def check_products(model: nn.Module, dtype: torch.dtype) -> None:
    """Raise RuntimeError if a matmul on this CPU gives different results for equal rows of its input.

    Batch invariance also requires that equal calls return equal results, which this function does not check.
    """
    random = torch.Generator().manual_seed(0)
    results = {}  # the key describes the matmul's operands
    weights = [p for name, p in model.named_parameters() if p.dim() >= 2 and "conv1d" not in name]
    for p in {tuple(p.shape[-2:]): p for p in weights}.values():  # [..., outputs, inputs]
        weight = p.reshape(-1, *p.shape[-2:])[0].to(dtype)
        row = torch.randn(weight.shape[1], generator=random).to(dtype)
        results[f"{[*weight.shape]} of {dtype}"] = cpu_ops.linear(row.expand(cpu_ops.ROWS, -1), weight)
    for layer in {layer.cache_spec(): layer for layer in model.modules() if isinstance(layer, Attention)}.values():
        keys = torch.randn(layer.num_kv_heads, KEYS, layer.head_dim, generator=random)
        num_rows = QUERIES * layer.num_heads // layer.num_kv_heads
        scores = keys[:, :1].repeat(1, num_rows, 1) @ keys.transpose(1, 2)
        values = scores[:, :1].repeat(1, num_rows, 1) @ keys
        results[f"{[*keys.shape]}, keys and values"] = torch.cat((scores, values), 2).transpose(0, 1)
    for name, rows in results.items():
        if not torch.equal(rows, rows[:1].expand_as(rows)):
            raise RuntimeError(f"batch_invariant=True: equal rows times {name} have different results on this CPU")
