"""`quant_method: compressed-tensors`: what its config says about each module."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tilewright.kernels.rotation import KIND, Rotation

from ...families.config import HEAD_SIZE
from ..declared import Declared, DeclaredNumbers, Fields

FORMATS = (
    *("pack-quantized", "int-quantized", "float-quantized", "naive-quantized"),
    *("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized", "dense"),
)
UNREAD = {  # formats by how they begin, in the words of those who have them
    "sparse-24": "weights of which 2 in 4 are left out",
    "sparse": "sparse weights",
    "marlin-24": "int4 weights of which 2 in 4 are left out, laid out for Marlin",
    "mxfp6": "MXFP6 weights",
}
WAY_OUT = "load it with transformers, which decompresses it with `run_compressed=False`, and save that"
EMBEDDING = "embed"
CLASSES = re.compile(r"[A-Z]\w*$")  # targets that are classes of modules: Linear
SCALE_DTYPES = ("torch.float8_e4m3fn", "torch.uint8", "torch.bfloat16", "torch.float16", "torch.float32")


@dataclass(frozen=True)
class CompressedTensors:
    """Groups of modules, each with the arguments of its weights."""

    id: str = "compressed-tensors"

    def read(self, fields: Fields) -> Declared:
        """See `QuantMethod.read`."""
        fields.take("quant_method")
        form = _format(fields, (*FORMATS, "mixed-precision"), "dense")
        fields.choose("quantization_status", ("compressed", "frozen"), "compressed")
        sparsity = fields.inner("sparsity_config")
        if sparsity:
            _format(sparsity, ("dense",), "dense")
            sparsity.skip("sparsity_structure", "targets", "ignore", "global_sparsity", "registry_requires_subclass")
            sparsity.close()
        fields.absent("moe_sparsity_config")
        rotations = _rotations(fields.inner("transform_config"))
        ignored = fields.names("ignore")
        fields.skip(
            "global_compression_ratio", "kv_cache_scheme", "version", "packed_modules_mapping", "run_compressed"
        )
        groups = fields.inner("config_groups")
        found: list[tuple[list[str], DeclaredNumbers | None]] = []
        for key in groups.remaining() if groups else []:
            group = groups.inner(key) if groups else None
            if group is None:
                raise fields.fail("config_groups", f"holds no object under {key!r}")
            targets = group.names("targets")
            found.append((targets, _numbers(group, form)))
            group.skip("input_activations", "output_activations")
            group.close()
        fields.close()
        if groups is None:  # nothing is said but how codes lie: shapes have to tell
            unsaid = DeclaredNumbers("", packing=form if form != "dense" else "")
            return rotated(lambda module: None if _names(module, ignored) else unsaid, rotations)

        def declared(module: str) -> DeclaredNumbers | None:
            if _names(module, ignored):
                return None
            for exact in (True, False):
                for targets, numbers in found:
                    if _names(module, targets) if exact else any(CLASSES.match(target) for target in targets):
                        return numbers
            return None

        return rotated(declared, rotations)


def _format(fields: Fields, known: Sequence[str], default: str) -> str:
    """The value of `format`; what is not read is refused by the name that people know it by."""
    value = fields.take("format")
    if value is None or value in known:
        return default if value is None else str(value)
    what = next((name for start, name in UNREAD.items() if str(value).startswith(start)), "")
    said = f"is `{value}`: {what} of compressed-tensors are not read" if what else f"is {value!r}, which is not read"
    raise fields.fail("format", f"{said}; known: {', '.join(known)}", WAY_OUT)


@dataclass(frozen=True)
class RotatedModules:
    """Modules whose input one rotation is for.

    Attributes:
        rotation: The rotation.
        targets: Their paths, or classes.
        ignore: Paths of those of these classes that are not meant.
    """

    rotation: Rotation
    targets: Sequence[str]
    ignore: Sequence[str]

    def has(self, module: str) -> bool:
        """Whether the module is one of them; every module but embeddings may be of a class that is named."""
        if _names(module, self.ignore):
            return False
        of_class = any(CLASSES.match(target) for target in self.targets) and EMBEDDING not in module
        return of_class or _names(module, self.targets)


def rotated(declared: Declared, rotations: Sequence[RotatedModules]) -> Declared:
    """The same numbers, with the rotations that are for a module; of one without numbers, these alone."""

    def with_rotations(module: str) -> DeclaredNumbers | None:
        numbers, mine = declared(module), tuple(found.rotation for found in rotations if found.has(module))
        return replace(numbers or DeclaredNumbers(""), rotations=mine) if mine else numbers

    return with_rotations if rotations else declared


def _rotations(fields: Fields | None) -> list[RotatedModules]:
    """The groups of a `transform_config` that rotates inputs by Hadamard blocks, and weights by their inverse."""
    groups = fields.inner("config_groups") if fields else None
    if fields is None or groups is None:
        return []
    fields.close()
    found = []
    for key in groups.remaining():
        group = groups.inner(key)
        if group is None or group.choose("type", (KIND,)) is None:
            raise groups.fail(key, "names no type of transform")
        group.absent("randomize")
        group.skip("requires_grad", "precision")
        try:
            rotation = Rotation.from_json({"kind": KIND, "block": group.take(HEAD_SIZE)})
        except ValueError as error:
            raise group.fail(HEAD_SIZE, f"is not read: {error}") from None
        where: dict[str, tuple[list[str], list[str]]] = {}
        steps = group.take("apply")
        for number, step in enumerate(steps if isinstance(steps, list) else [None]):
            name = f"apply[{number}]"
            if not isinstance(step, Mapping):
                raise group.fail("apply", "is no list of objects")
            one = Fields(step, group.name(name))
            location = one.choose("location", ("input", "weight_input"))
            if location is None or location in where:
                raise group.fail(name, "names no location, or one twice")
            where[location] = one.names("targets"), one.names("ignore")
            one.skip("inverse")  # the matrix is its own inverse
            one.close()
        if "input" not in where or len({str(modules) for modules in where.values()}) > 1:
            raise group.fail("apply", "does not rotate the inputs of those modules whose weights it rotates")
        group.close()
        found.append(RotatedModules(rotation, *where["input"]))
    return found


def _names(module: str, entries: Sequence[str]) -> bool:
    """Whether entries name this module: by its path, or by `re:` and a regex from the beginning."""
    return any(
        re.match(entry[3:], module) is not None if entry.startswith("re:") else entry == module for entry in entries
    )


def _numbers(group: Fields, form: str) -> DeclaredNumbers | None:
    """What one of `config_groups` says about weights; None if it leaves them alone."""
    weights = group.inner("weights")
    packing = _format(group, FORMATS, form)
    if weights is None:
        return None
    kind = weights.choose("type", ("int", "float"), "int")
    bits = weights.number("num_bits", 8)
    if kind == "float" and bits not in {4, 8}:
        raise weights.fail("num_bits", f"is {bits}: FP{bits} weights are not read, of floats only FP4 and FP8", WAY_OUT)
    size = weights.take("group_size")
    strategies = ("tensor", "channel", "group", "block", "tensor_group")
    default = "tensor" if size is None else "channel" if size == -1 else "group"
    strategy = weights.choose("strategy", strategies, default)
    structure = weights.take("block_structure")
    if strategy in {"group", "tensor_group"} and not (isinstance(size, int) and size > 0):
        raise weights.fail("group_size", f"is {size!r} with strategy `{strategy}`")
    if strategy == "block":
        is_pair = isinstance(structure, list) and len(structure) == 2 and all(type(x) is int for x in structure)
        if not is_pair:
            raise weights.fail("block_structure", f"is {structure!r}, two sizes are expected")
    elif structure is not None:
        raise weights.fail("block_structure", f"is {structure!r} with strategy `{strategy}`")
    if strategy in {"tensor", "channel"} and size not in {None, -1}:
        raise weights.fail("group_size", f"is {size!r} with strategy `{strategy}`")
    order = weights.choose("actorder", ("weight", "static", "group", "dynamic", True, False))
    weights.absent("dynamic")
    scale_dtype = weights.choose("scale_dtype", SCALE_DTYPES, "")
    weights.skip("observer", "observer_kwargs", "zp_dtype")
    symmetric = weights.flag("symmetric", True)
    weights.close()
    blocks = {"tensor": (0, 0), "channel": (1, 0), "group": (1, size), "tensor_group": (1, size)}
    block = tuple(structure) if strategy == "block" else blocks[strategy]
    by_activation = order in {"group", "dynamic", True} and order is not False
    return DeclaredNumbers(kind, bits, block, symmetric, by_activation, packing, scale_dtype.removeprefix("torch."))


COMPRESSED_TENSORS = CompressedTensors()
