"""An `Inspection` as a page of text."""

from __future__ import annotations

from collections.abc import Sequence

from .families.config import HIDDEN, LAYERS
from .inspect import Inspection, ItemGroup

SIZES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
COUNTS = ((1e9, "B"), (1e6, "M"), (1e3, "K"))


def describe(found: Inspection) -> str:
    """Headline, one table of what is quantized and one of what is not, notes."""
    quantized = [share for share in found.shares if not share.reason]
    kept = [share for share in found.shares if share.reason]
    lines = [found.path, *(f"  {line}" for line in _headline(found))]
    if found.kind == "plain":
        lines += ["", *_table(("what", "tensors", "encoding", "parameters", "size"), [_plain(s) for s in found.shares])]
    else:
        head = ("quantized", "modules" if found.kind == "packed" else "tensors", "format", "layout", "bits", "size")
        lines += ["", *_table(head, [_quantized(share) for share in quantized])]
        lines += ["", *_table(("left as it is", head[1], "encoding", "size", "why"), [_kept(share) for share in kept])]
    lines += [""] * bool(found.notes) + [f"note: {note}" for note in found.notes]
    return "\n".join(lines)


def _headline(found: Inspection) -> list[str]:
    model = found.model
    kind = {"plain": "plain checkpoint", "quantized": f"quantized: {found.scheme}", "packed": f"packed: {found.scheme}"}
    lines = [kind[found.kind] + (f", by Tilewright {found.made_by}" if found.made_by else "")]
    facts = [str(model["model_type"] or "unknown model")]
    facts += [f"{model[LAYERS]} layers"] * bool(model[LAYERS])
    facts += [f"hidden size {model[HIDDEN]}"] * bool(model[HIDDEN])
    if model["experts"]:
        width = f" of width {model['moe_intermediate_size']}" if model["moe_intermediate_size"] else ""
        facts.append(f"{model['experts']} experts{width}, {model['num_experts_per_tok']} per token")
    facts += ["tied head"] * model["tied_head"] + [f"{model['mtp_tensors']} MTP tensors"] * bool(model["mtp_tensors"])
    lines.append(", ".join(facts))
    files = f"{found.files} file" + "s" * (found.files != 1)
    lines.append(f"{_count(found.parameters)} parameters in {_size(found.nbytes)}, {found.bits:.2f} bits each, {files}")
    if found.cut and found.cut != {"tp": [0, 1], "ep": [0, 1]}:
        (tp, tps), (ep, eps) = found.cut["tp"], found.cut["ep"]
        lines.append(f"share of one rank: tensor-parallel {tp} of {tps}, expert-parallel {ep} of {eps}")
    return lines


def _plain(share: ItemGroup) -> tuple[str, ...]:
    return (share.role, str(share.items), share.encoding, _count(share.parameters), _size(share.nbytes))


def _quantized(share: ItemGroup) -> tuple[str, ...]:
    return (share.role, str(share.items), share.encoding, share.layout or "-", f"{share.bits:.2f}", _size(share.nbytes))


def _kept(share: ItemGroup) -> tuple[str, ...]:
    encoding = f"{share.encoding}, {share.layout}" if share.layout else share.encoding
    return (share.role, str(share.items), encoding, _size(share.nbytes), share.reason)


def _scaled(value: float, units: Sequence[tuple[float, str]], none: str) -> str:
    for unit, name in units:
        if value >= unit:
            return f"{value / unit:.3g} {name}"
    return f"{value:.0f}{none}"


def _size(nbytes: int) -> str:
    return _scaled(nbytes, SIZES, " B")


def _count(number: int) -> str:
    return _scaled(number, COUNTS, "").replace(" ", "")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns padded to their width; numbers and sizes to the right."""
    if not rows:
        return [f"{head[0]}: nothing"]
    right = {"tensors", "modules", "bits", "size", "parameters"}
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]

    def line(row: Sequence[str]) -> str:
        cells = [c.rjust(w) if name in right else c.ljust(w) for c, w, name in zip(row, widths, head, strict=True)]
        return "  ".join(cells).rstrip()

    return [line(head), *(line(row) for row in rows)]
