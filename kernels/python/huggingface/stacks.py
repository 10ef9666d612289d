"""How modules of transformers arrange the stacks of their experts."""

from __future__ import annotations

from torch import nn

from ..model_names import DOWN, GATE_UP


def holds_transposed(module: nn.Module, shape: tuple[int, ...] = (), held: tuple[int, ...] = ()) -> bool:
    """Whether a module of experts holds its matrices as [in, out].

    Classes mostly say so. Else the shapes of both stacks tell, as one alone may be square: gate over up of transposed
    matrices is [E, H, 2I] where down is [E, I, H].

    Args:
        module: The module.
        shape: Shape of a stack of matrices [out, in], for modules with other names.
        held: Shape of the parameter that is to hold it.
    """
    said = getattr(module, "is_transposed", None)
    if said is not None:
        return bool(said)
    upper, lower = module._parameters.get(GATE_UP), module._parameters.get(DOWN)
    if upper is None or lower is None or upper.dim() != 3 or lower.dim() != 3:
        return tuple(shape) != tuple(held)
    return tuple(upper.shape[1:]) == (lower.shape[2], 2 * lower.shape[1])
