"""Defines the model runner of a CUDA rank for the setting `batch_invariant`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from nanovllm.attention.triton import TritonBackend
from nanovllm.cuda.runner import CUDAModelRunner
from nanovllm.delta_net.gated_delta_net import GatedDeltaNet
from nanovllm.invariant import VARIANT, cuda_ops, invariant_operations, refuse_states
from nanovllm.invariant.kernels.invariant_decode import empty_parts
from nanovllm.kernels import ops, register_ops
from nanovllm.kernels.launch.gpu_features import has_tma
from nanovllm.layers.attention import Attention
from nanovllm.utils.checks import check_choice

MAX_HEAD_DIM = 256  # tiles of longer rows do not fit into shared memory

register_ops("cuda" + VARIANT, vars(ops) | vars(cuda_ops))


class InvariantTritonBackend(TritonBackend):
    def __init__(self):
        super().__init__()
        self.ops = cuda_ops


class Runner(CUDAModelRunner):
    """A runner that computes each row of a step with kernels whose results do not depend on other rows."""

    def make_backend(self) -> InvariantTritonBackend:
        check_choice("batch_invariant=True on CUDA: dtype", self.config.dtype, (torch.bfloat16, torch.float16))
        if not has_tma(self.device):  # only the matmul instructions of these GPUs give equal results in all tiles
            raise ValueError(f"batch_invariant=True: {torch.cuda.get_device_name(self.device)} is older than Hopper")
        return InvariantTritonBackend()

    def warm_up(self, part_done: Callable[[str], None]) -> None:
        refuse_states(self, GatedDeltaNet)
        head_dims = [layer.head_dim for layer in self.model.modules() if isinstance(layer, Attention)]
        if (largest := max(head_dims)) > MAX_HEAD_DIM:
            raise ValueError(f"batch_invariant=True on CUDA: head_dim={largest}: must be at most {MAX_HEAD_DIM}")
        super().warm_up(part_done)

    def size_kv_cache(self, available: int) -> None:
        """Reserve memory for the partial sums of decode attention.

        The partial sums are missing in the measured memory use, because it was measured in a prefill step.
        """
        num_rows, max_len = self.config.max_num_seqs * self.config.tokens_per_row, self.config.max_model_len
        layers = (layer for layer in self.model.modules() if isinstance(layer, Attention))
        shapes = {(num_rows * layer.num_heads, layer.head_dim, max_len, layer.window) for layer in layers}
        needed = max(sum(part.nbytes for part in empty_parts(*shape, "meta")) for shape in shapes)
        super().size_kv_cache(available - needed)

    @contextmanager
    def on_device(self) -> Iterator[None]:
        with invariant_operations(), super().on_device():
            yield
