"""The words of a profile: what a step computes, the modules that weigh most at each depth, the tree."""

from __future__ import annotations

from collections.abc import Callable

from paceline.base.text_table import text_table
from paceline_lens.observe.operations import ModulePart, Profile


def text(profile: Profile, depth: int = -1, top: int = 1, detailed: bool = True) -> str:
    """A profile in words.

    Args:
        depth: how deep it goes; -1: all the way.
        top: modules listed at each depth.
        detailed: with the tree.
    """
    heading = f"flops of step {profile.step}" if profile.step else "flops of one forward pass"
    lines = [heading, *text_table(_whole(profile), numbers=True)]
    heaviest = _heaviest(profile.model, depth, top)
    lines += ["", f"modules that weigh most (top {top}) at each depth", *text_table(heaviest, numbers=True)]
    if detailed:
        lines += ["", "modules", *text_table(_tree(profile.model, depth), numbers=True)]
    lines.append("Matrix products, convolutions and attention count; biases, activations, norms and losses do not.")
    return "\n".join(lines)


def _whole(profile: Profile) -> list[list[str]]:
    seconds = profile.total_ms / 1e3
    rows = [
        ["parameters of the model", number(profile.parameters)],
        ["parameters of modules on this rank", number(profile.model.parameters)],
        ["micro-batches", str(profile.micro_batches)],
        ["forward, this rank", f"{number(profile.forward)}FLOP, {number(profile.macs)}MACs"],
        ["forward, one copy of the model", f"{number(profile.copy)}FLOP"],
        ["forward, all ranks", f"{number(profile.everywhere)}FLOP"],
        ["backward, this rank", f"{number(profile.backward)}FLOP"],
    ]
    if profile.recomputed:
        rows.append(["computed again in backward", f"{number(profile.recomputed)}FLOP"])
    for name, ms, flops in (
        ("forward", profile.forward_ms, profile.forward),
        ("backward", profile.backward_ms, profile.backward + profile.recomputed),
    ):
        if ms:
            rows.append([f"{name} time", f"{ms:.2f} ms, {number(flops / ms * 1e3)}FLOPS"])
    if profile.pipeline_ms:
        rows.append(["waiting for other stages", f"{profile.pipeline_ms:.2f} ms"])
    if seconds:
        rows.append(["optimizer time", f"{profile.step_ms:.2f} ms"])
        rows.append(["whole step", f"{profile.total_ms:.2f} ms, {number(profile.total / seconds)}FLOPS"])
    return rows


_BY: tuple[tuple[str, Callable[[ModulePart], float]], ...] = (
    ("parameters", lambda part: part.parameters),
    ("MACs", lambda part: part.macs),
    ("latency ms", lambda part: part.latency_ms),
)


def by_depth(model: ModulePart) -> dict[int, dict[str, ModulePart]]:
    """For each depth the classes of modules there, each as the sum of its modules."""
    sums: dict[int, dict[str, ModulePart]] = {}
    for depth, part in model.walk():
        kinds = sums.setdefault(depth, {})
        kinds.setdefault(part.kind, ModulePart(part.kind, part.kind)).add(part)
    return sums


def _heaviest(model: ModulePart, depth: int, top: int) -> list[list[str]]:
    rows = [["depth", *(name for name, _ in _BY)]]
    for level, kinds in by_depth(model).items():
        if depth >= 0 and level > depth:
            break
        cells = [str(level)]
        for name, value in _BY:
            heavy = sorted(kinds.values(), key=value, reverse=True)[:top]
            form = _two_digits if "ms" in name else number
            cells.append(", ".join(f"{kind.kind} {form(value(kind))}".strip() for kind in heavy))
        rows.append(cells)
    return rows


def _tree(model: ModulePart, depth: int) -> list[list[str]]:
    rows = [["module", "parameters", "share", "MACs", "share", "forward ms", "share", "FLOPS"]]
    for level, part in model.walk():
        if depth >= 0 and level > depth:
            continue
        name = part.name.rpartition(".")[2] or "model"
        row = [f"{'  ' * level}{name} ({part.kind})"]
        row += [number(part.parameters), share(part.parameters, model.parameters)]
        if part.calls:
            row += [number(part.macs), share(part.macs, model.macs)]
            row += [f"{part.latency_ms:.3f}", share(part.latency_ms, model.latency_ms)]
            # A module that was counted and not called in the timed step has no time.
            row.append(number(part.flops / part.latency_ms * 1e3) if part.latency_ms else "0")
        else:
            row += ["not called", "", "", "", ""]
        rows.append(row)
    return rows


def _two_digits(value: float) -> str:
    return f"{value:.2f}"


def number(value: float, digits: int = 2) -> str:
    """A count for people: 813056 is `813.06 K`."""
    for unit, scale in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("K", 1e3)):
        if value >= scale:
            return f"{value / scale:.{digits}f} {unit}"
    return f"{value:.0f} " if value == int(value) else f"{value:.{digits}f} "


def share(part: float, whole: float) -> str:
    """A part of a whole in percent."""
    return f"{part / whole:.1%}" if whole else "0.0%"
