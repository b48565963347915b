"""Reads the adapters of experts, which PEFT stores in two forms.

In transformers 4, each projection of each expert is a linear layer, such as `experts.3.gate_proj`, and has its own
adapter.

In transformers 5, PEFT's `target_parameters` adapts the stacked parameters `experts.gate_up_proj` and
`experts.down_proj`. Rows `e * rank` to `e * rank + rank - 1` of A [experts * rank, inputs] belong to expert `e`. In B
[outputs, rank * experts], columns `e`, `experts + e`, `2 * experts + e` and so on belong to expert `e`. For most
models, PEFT versions before 0.20 swap the inputs and outputs of A and B. The names of the matrices, `experts.lora_A`
and `experts.base_layer.lora_A`, show only the order in which PEFT found the parameters. The shapes show which parameter
is adapted, and whether inputs and outputs are swapped.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch

from nanovllm.lora.adapter_config import AdapterConfig, matches
from nanovllm.lora.adapter_tensors import PREFIX, AdapterTensors
from nanovllm.utils.nested_names import nested_names

PROJECTIONS = "gate_proj", "up_proj", "down_proj"
WRAPPED = ".base_layer"  # what PEFT adds to the experts' name if another parameter of the experts has an adapter, too


class ExpertsShape(NamedTuple):
    """Describes the sizes of a mixture of experts. Each size is a total over all ranks."""

    num_experts: int
    hidden_size: int
    size: int  # the inner size of an expert
    alternates: bool  # whether outputs of gate and up alternate in the stacked parameter

    def of_expert(self, projection: str) -> tuple[int, int]:
        """Return the numbers of inputs and outputs of a projection of one expert."""
        sizes = self.hidden_size, self.size
        return sizes[::-1] if projection == "down_proj" else sizes

    def single_names(self, path: str) -> list[str]:
        """Return the names of the projections of all experts. The names begin with `path`."""
        return [f"{path}.{i}.{projection}" for i in range(self.num_experts) for projection in PROJECTIONS]

    @property
    def parameters(self) -> dict[str, tuple[int, int]]:
        """Maps the name of each stacked parameter to the numbers of inputs and outputs of one expert."""
        return {"gate_up_proj": (self.hidden_size, 2 * self.size), "down_proj": (self.size, self.hidden_size)}


class Stack(NamedTuple):
    """Describes the adapter of a stacked parameter."""

    parameter: str
    stored: str  # the module's name in the file
    is_swapped: bool | None  # whether A has the outputs, and B the inputs; None if the numbers are equal

    @property
    def full_name(self) -> str:
        return f"{self.stored.removesuffix(WRAPPED)}.{self.parameter}"


class ExpertReader:
    """Reads the adapters of experts from a file. Methods raise a ValueError that names the file and the tensor."""

    def __init__(
        self,
        tensors: AdapterTensors,
        config: AdapterConfig,
        experts: Mapping[str, ExpertsShape],
        modules: Mapping[str, str],
        max_rank: int,
    ):
        """experts: the mixtures of experts in the model, by name.

        modules: maps the name of each adapted module in the model to the module's name in the file.
        """
        self._tensors, self._config, self._experts, self._modules = tensors, config, experts, modules
        self._bound = "max_expert_lora_rank", max_rank
        self._stacks = {path: self._find_stacks(path, shape) for path, shape in experts.items()}
        self._check_parameters()
        # PEFT swaps inputs and outputs of all parameters of a model, or of none
        self._directions = {stack.is_swapped for found in self._stacks.values() for stack in found} - {None}

    def read(self, path: str) -> list[tuple[torch.Tensor, torch.Tensor] | None]:
        """For each of PROJECTIONS, return A [experts, rank, inputs] and B [experts, outputs, rank].

        If no expert's projection has an adapter, return None in place of A and B.
        """
        shape = self._experts[path]
        found = [self._read_single(path, projection) for projection in PROJECTIONS]
        if any(found) and self._stacks[path]:
            problem = f"{PREFIX}{self._stacks[path][0].stored}: the file has adapters of single experts, too"
            raise ValueError(f"{self._tensors.file}: {problem}")
        for stack in self._stacks[path]:
            a, b = self._read_stack(stack, shape)
            if stack.parameter == "down_proj":
                found[2] = a, b
            else:
                gate, up = (b[:, ::2], b[:, 1::2]) if shape.alternates else b.chunk(2, 1)
                found[:2] = (a, gate), (a, up)
        return found

    def _read_single(self, path: str, projection: str) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Read the adapters of a projection from a file that stores the adapter of each expert separately.

        An expert without an adapter gets zeros. Zeros also pad matrices that have a smaller rank.
        """
        count, (inputs, outputs) = self._experts[path].num_experts, self._experts[path].of_expert(projection)
        names = {i: f"{path}.{i}.{projection}" for i in range(count)}
        modules = {i: self._modules[name] for i, name in names.items() if name in self._modules}
        if not modules:
            return None
        ranks = {i: self._config.rank_within(module, *self._bound) for i, module in modules.items()}
        a = torch.zeros(count, max(ranks.values()), inputs, dtype=self._tensors.dtype)
        b = torch.zeros(count, outputs, max(ranks.values()), dtype=self._tensors.dtype)
        for i, module in modules.items():
            rank, scale = ranks[i], self._config.scale_of(module)
            a[i, :rank], b[i, :, :rank] = self._tensors.pair(module, (rank, inputs), (outputs, rank), scale)
        return a, b

    def _read_stack(self, stack: Stack, shape: ExpertsShape) -> tuple[torch.Tensor, torch.Tensor]:
        """Return A [experts, rank, inputs] and B [experts, outputs, rank] of a stacked parameter."""
        is_swapped, count, sides = stack.is_swapped, shape.num_experts, shape.parameters[stack.parameter]
        if is_swapped is None:
            if len(self._directions) != 1:
                raise ValueError(
                    f"{self._tensors.file}: {PREFIX}{stack.stored}: {stack.parameter} has as many inputs as outputs, "
                    "so the shapes do not show whether A or B belongs to the inputs"
                )
            (is_swapped,) = self._directions
        columns, rows = sides[::-1] if is_swapped else sides
        rank, scale = self._config.rank_within(stack.full_name, *self._bound), self._config.scale_of(stack.full_name)
        a, b = self._tensors.pair(stack.stored, (count * rank, columns), (rows, rank * count), scale)
        a, b = a.view(count, rank, columns), b.view(rows, rank, count).permute(2, 0, 1)
        return (b.mT, a.mT) if is_swapped else (a, b)

    def _find_stacks(self, path: str, shape: ExpertsShape) -> list[Stack]:
        """Find the stacked parameters that have adapters."""
        found: list[Stack] = []
        for stored in (self._modules[name] for name in (path, path + WRAPPED) if name in self._modules):
            a, b = self._tensors.shapes(stored)
            sides = (a[-1], b[0]) if len(a) == len(b) == 2 else ()
            name = next((name for name, pair in shape.parameters.items() if sides in (pair, pair[::-1])), None)
            if name is None or name in (stack.parameter for stack in found):
                known = " or ".join(f"{name} {list(pair)}" for name, pair in shape.parameters.items())
                raise ValueError(
                    f"{self._tensors.file}: {PREFIX}{stored}: A and B have shapes {a} and {b}: the last size of A and "
                    f"the first of B must be the inputs and outputs of {known}, each of which may have one adapter"
                )
            found.append(Stack(name, stored, None if sides == sides[::-1] else sides != shape.parameters[name]))
        return found

    def _check_parameters(self) -> None:
        """Check that the stacked parameters in the file are those that the config names."""
        config, known = self._config, []
        for path, shape in self._experts.items():
            stacks = {stack.parameter: stack for stack in self._stacks[path]}
            for parameter in shape.parameters:
                known += (names := nested_names(f"{path}.{parameter}"))
                stack = stacks.get(parameter)
                if stack is not None and not config.includes_parameter(stack.full_name):
                    problem = f"{stack.full_name}: does not match target_parameters in {config.file}"
                    raise ValueError(f"{self._tensors.file}: {PREFIX}{problem}")
                if stack is None and any(map(config.includes_parameter, names)):
                    problem = f"the adapter of {names[0]} is missing, but matches target_parameters"
                    raise ValueError(f"{self._tensors.file}: {problem}")
        for entry in config.target_parameters:
            if not any(matches((entry,), name) for name in known):
                raise ValueError(
                    f"{config.file}: target_parameters: {entry!r:.80}: is not supported; this engine has adapters only "
                    "for the parameters gate_up_proj and down_proj of the model's experts"
                )
