"""The problems that keep launchers from taking part in a run together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.base.errors import Problem
from paceline.base.version import VERSION
from paceline.launch.rounds import Member, Place
from paceline_hosts.membership.rules import Rules

_SETTING_NAMES = (
    "number of nodes",
    "number of nodes",
    "number of restarts",
    "name of the run (--rdzv-conf run_id)",
    "store (--rdzv-endpoint)",
)

_ANSWERS = {"stranger": "is not a launcher of Paceline", "secret": "has another secret", "tls": "differs in --tls"}


def disagreement(
    me: Member, mine: Rules, namesake: Member | None, other: Member, theirs: Sequence[Any]
) -> Problem | None:
    """Returns the setting in which a launcher that wants to join differs; None for no difference.

    Args:
        me: the launcher that was asked.
        mine: its settings.
        namesake: the launcher here with the same number of a node, if any.
        other: the launcher that wants to join.
        theirs: its settings, as `Rules.common`.
    """
    fix = "start the same command on every node, with another --node-rank on each, or with none on all"
    for name, here, there in zip(_SETTING_NAMES, mine.common, theirs, strict=True):
        if here != there:
            why = f"{me.shown} says {here or 'none'}, {other.shown} says {there or 'none'}"
            return Problem("launch-nodes", f"nodes disagree about the {name}.", why, fix)
    if (other.node >= 0) != (me.node >= 0):
        why = f"{me.shown} and {other.shown}"
        return Problem("launch-nodes", "some nodes have a number, and others have none.", why, fix)
    if namesake is not None and other.node >= 0 and namesake.id != other.id:
        why = f"one is on {namesake.host}, the other on {other.host}"
        return Problem("launch-nodes", f"two launchers have the number of node {other.node}.", why, fix)
    return None


def cut_off(lost: str, here: int, before: int, store: str = "") -> Problem:
    """Returns the problem of a part of a run that may not go on.

    Args:
        lost: how the other nodes were lost.
        here, before: how many nodes are left, and how many the last round had.
        store: why the store does not let this part go on; "" where there is no store.
    """
    why = f"{here} of {before} nodes reach each other; the others may be going on"
    return Problem(
        "launch-cut-off",
        f"this node ended: {lost}, and too few are left to go on.",
        f"{why}; {store}" if store else why,
        "repair the network or the host, and start the same command here again: it joins the run",
    )


def unanswered(join_timeout_s: float, answers: Mapping[Place, str]) -> Problem:
    """No run was found."""
    shown = [f"{address}:{port} {_ANSWERS.get(how, how)}" for (address, port), how in answers.items()]
    asked = ", ".join(shown) or "this host"
    return Problem(
        "launch-address",
        f"node 0 does not answer within {join_timeout_s:g} s.",
        f"--main-address, --main-port: {asked}",
        "start node 0, open that port in its firewall, or wait longer with --rdzv-conf timeout=600",
    )


def mismatch(answers: Mapping[Place, str]) -> Problem | None:
    """Returns the problem if the launchers that answer have another secret, or differ in `--tls`; None otherwise.

    There is no problem while a launcher of this run answers at another place.
    """
    if {"no leader", "redirect"} & set(answers.values()):
        return None
    places = _places_that_say("secret", answers)
    if places:
        return Problem(
            "launch-secret",
            f"the launcher at {places} has another secret than this one.",
            "all launchers of a run prove that they have the same secret before they read anything from each other",
            "copy ~/.paceline/secret of node 0 to this host, or set PACELINE_RUN_SECRET to the same value on every node",
        )
    places = _places_that_say("tls", answers)
    if places:
        return Problem(
            "launch-tls",
            f"this launcher and the one at {places} do not agree on --tls.",
            "one was started with --tls, and the other without",
            "start the same command on every node",
        )
    return None


def _places_that_say(wanted: str, answers: Mapping[Place, str]) -> str:
    places = [f"{address}:{port}" for (address, port), answer in answers.items() if answer == wanted]
    return ", ".join(places)


def other_version(host: str, version: str, why: str = "") -> Problem:
    """Returns the problem of two launchers with different versions of Paceline."""
    detail = f" ({why})" if why else ""
    return Problem(
        "launch-version",
        "the nodes of this run have different versions of Paceline.",
        f"{host} has {version}, this host has {VERSION}{detail}",
        f"install one version, such as {VERSION}, on all nodes, and start them again",
    )


def too_few(rules: Rules, members: Sequence[Member], port: int, lost: str) -> Problem:
    """Returns the problem if not enough nodes have joined, or joined again."""
    numbers = {member.node for member in members}
    missing = [node for node in range(rules.most) if node not in numbers]
    who = f"nodes {missing}"
    if min(numbers) < 0:  # some have no number
        who = f"{rules.least - len(members)} of {rules.least} nodes"
    before = f"; before, {lost}" if lost else ""
    return Problem(
        "launch-address",
        f"{who} did not join within {rules.join_timeout_s:g} s.",
        f"node 0 waits at port {port}{before}",
        "start the same command on each of them, with --main-address naming this host",
    )
