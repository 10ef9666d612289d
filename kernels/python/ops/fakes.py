"""What `torch.compile` and meta tensors ask of an operator: the shape of its result, once its arguments make sense.

A call with one meta tensor among others comes here too, whatever the result's device is: without a check it would
return memory that nobody wrote.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def register(name: str, result: Callable[..., Tensor | None]) -> None:
    """Gives the operator `tilewright::name` the fake implementation `result`, behind a check of all devices.

    Args:
        name: Of the operator and its overload, as `linear_int8` or `linear_int8.out`.
        result: Called with the operator's arguments, by position and by name.
    """
    packet, _, overload = name.partition(".")
    arguments = getattr(getattr(torch.ops.tilewright, packet), overload or "default")._schema.arguments
    names = [argument.name for argument in arguments]

    def fake(*values: object, **named: object) -> Tensor | None:
        given = dict(zip(names, values, strict=False)) | named
        tensors = {key: value for key, value in given.items() if isinstance(value, Tensor)}
        first, like = next(iter(tensors.items()))
        for key, tensor in tensors.items():
            if tensor.device != like.device:
                raise RuntimeError(
                    f"tilewright: {name}: {key} is on {tensor.device}, {first} on {like.device}; all must be on one"
                )
        return result(*values, **named)

    torch.library.register_fake(f"tilewright::{name}")(fake)


def nothing(*_values: object, **_named: object) -> None:
    """The result of an operator that writes into `out`."""


def rows_like(x: Tensor, n: int, packed_rows: int) -> Tensor:
    """An empty result [..., n] for `x` [..., K] and a weight of so many packed rows.

    Raises:
        RuntimeError: The weight does not have n rows.
    """
    if not 0 <= n <= packed_rows:
        raise RuntimeError(f"tilewright: weight has {packed_rows} packed rows, n is {n}")
    return x.new_empty((*x.shape[:-1], n))
