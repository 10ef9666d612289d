"""A norm by the root mean square, in the place of those that models write in eight calls."""

from __future__ import annotations

from torch import Tensor, nn

from ..ops.norms import rms_norm
from .weight import refuse_gradient


class RmsNorm(nn.Module):
    """A norm by the root mean square, run by `rms_norm`.

    Args:
        weight: fp32, bf16 or fp16 [K].
        epsilon: Added to the mean of squares.
    """

    def __init__(self, weight: nn.Parameter, epsilon: float) -> None:
        super().__init__()
        self.weight = weight
        self.variance_epsilon = epsilon

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Normalize the last axis: fp32, bf16 or fp16 [.., K] -> the same."""
        # Read where nn.Module keeps it, not as an attribute, as in PackedLinear: decoding calls this for every token.
        y = rms_norm(hidden_states, self._parameters["weight"], self.variance_epsilon)  # type: ignore[arg-type]
        return refuse_gradient(y, hidden_states) if hidden_states.requires_grad else y

    def extra_repr(self) -> str:
        """Size and epsilon."""
        return f"{self.weight.shape[0]}, eps={self.variance_epsilon}"
