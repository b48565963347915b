"""Describes the gated activations that kernels compute after a matmul."""

from collections.abc import Callable
from math import pi
from typing import Any, NamedTuple


class Activation(NamedTuple):
    """The parameters of a gated activation: gate * sigmoid(alpha * (gate + cubic * gate^3)) * (up + shift).

    If `limit` is not 0, `gate` is first clamped to at most `limit`, and `up` to the range from -limit to limit.
    """

    alpha: float = 1.0
    cubic: float = 0.0
    shift: float = 0.0
    limit: float = 0.0  # 0: no limit


SWIGLU = Activation()
GELU_AND_MUL = Activation(alpha=(8 / pi) ** 0.5, cubic=0.044715)  # GELU is approximated with tanh
# the `forward` functions of the modules whose activations are fused with the matmul before them; see fused_linear.py
FUSED_ACTIVATIONS: dict[Callable, Activation] = {}


def activation_of(module: Any) -> Activation | None:
    """Return the activation of a module, or None if no kernel fuses this activation with the preceding matmul."""
    return FUSED_ACTIVATIONS.get(getattr(type(module), "forward", None))  # modules of TorchScript have no `forward`
