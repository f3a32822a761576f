"""Merges the values that were given for each setting. The order is: code > command line > environment > file > default.

    flags  --------------------.                       launcher: resolve_launch
    PACELINE_*  ----------------+--> merge --> Resolved --> hand_over --> PACELINE_SETTINGS
    run.yaml (files.read)  -----'                                              |
    Accelerator(...)  ----------+--> merge --> Resolved   worker: resolve_run <'

The launcher resolves flags and files, and passes the result to its workers in one variable. Each worker merges it with
what the script says. Every value keeps its source and its exact place, and all problems are reported at once.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Any, Generic, TypeVar

from paceline.base import env as environment
from paceline.base.errors import ConfigError, Problem, short_repr
from paceline.config import options as strategy_options
from paceline.config.clusters import CLUSTERS
from paceline.config.dialects import Translation, dialects, judged, known_by_a_dialect, notice_of
from paceline.config.given import SOURCES, Choice, Given, nearest
from paceline.config.overrides import Overrides
from paceline.config.settings import TOTAL, LaunchSettings, RunSettings, launch_classes, own_name, settings_of

T = TypeVar("T")
HANDED = "PACELINE_SETTINGS"


@dataclass(frozen=True)
class Resolved(Generic[T]):
    """Holds merged settings and where each value came from.

    Attributes:
        settings: the merged values.
        decisions: one row for each setting, in order of definition.
        notices: what the user should know, each with what to do.
    """

    settings: T
    decisions: tuple[Choice, ...]
    notices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Launch:
    """Holds all settings of one `paceline launch`: those of the launcher, of the run and of the cluster.

    Attributes:
        launch, run: the merged values.
        decisions: one row for each setting, including the settings of single launchers.
        unused: options of other libraries that were given and have no effect here, each with the reason.
        notices: what the user should know, each with what to do.
        file: the config file that was read; None where there is none.
        variables: environment variables of other libraries. The objects of these libraries in the script read from them
            what the launcher was told.
        cluster: launcher name -> the merged values of its own settings, as an object of its settings class.
    """

    launch: LaunchSettings
    run: RunSettings
    decisions: tuple[Choice, ...]
    unused: tuple[Choice, ...] = ()
    notices: tuple[str, ...] = ()
    file: str | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    cluster: Mapping[str, Any] = field(default_factory=dict)

    @property
    def given(self) -> dict[str, str]:
        """The place of each setting that has been set: setting -> "--procs", "run.yaml:3" and the like."""
        places: dict[str, str] = {}
        for row in self.decisions:
            if row.source != "default":
                places[row.field] = row.where or row.source
        return places

    @property
    def not_in_environment(self) -> tuple[Choice, ...]:
        """The values from flags and from the config file.

        Other processes inherit environment variables, but they see neither the flags nor the file.
        """
        return tuple(row for row in self.decisions if row.source in ("command line", "file"))

    def hand_over(self) -> dict[str, str]:
        """Returns the environment variables that carry flags and file values to the workers."""
        variables = {HANDED: hand_over(self.decisions)}
        for dialect in dialects():
            variables |= dialect.hand_over(self.unused)
        return {**variables, **self.variables}


def resolve_run(script: Overrides | None = None, env: Mapping[str, str] | None = None) -> Resolved[RunSettings]:
    """Resolves the settings of this run in a worker process.

    Values from the script override those that the launcher passed on, the environment and a config file. Under another
    launcher than `paceline launch`, the file is the one that PACELINE_CONFIG names, if it is set.

    Args:
        script: what the script gives; None if it gives nothing.
        env: the environment; None stands for the environment of this process.

    Raises:
        ConfigError: `config-value`, `config-key`, `settings-handed`, and those of `files.read`; all problems at once.
    """
    env = environment.snapshot() if env is None else env
    problems: list[Problem] = []
    said = script or Overrides()
    plan = said.plan
    given = _from_code(said, problems)
    handed = _handed(env[HANDED]) if HANDED in env else []
    # The launcher may repeat a value from a file in a variable of another library, for that library's objects. Without
    # this filter the variable would be reported as the source, where the user wrote the value into a file.
    repeated = {(value.name, str(value.value)) for value in handed}
    for value in _from_env(env, RunSettings):
        if (value.name, str(value.value)) not in repeated:
            given.append(value)
    if HANDED in env:
        given += handed
    elif env.get("PACELINE_CONFIG"):
        _read_file(env["PACELINE_CONFIG"], given, problems)
    if isinstance(plan, str | Path):
        _read_file(str(plan), given, problems)
    # The variables for other libraries are left out: the launcher sets them, before its workers start.
    given, unused, _ = _translate(given, nodes_of(env), problems)
    values, decisions = _merge(RunSettings, given, problems)
    _raise(problems)
    notices = _notices(unused)
    # A launcher of ours has printed these before it started this process.
    if HANDED not in env:
        notices += _unknown_variables(env)
    return Resolved(RunSettings.of(values), decisions, tuple(notices))


def _from_code(script: Overrides, problems: list[Problem]) -> list[Given]:
    """Returns the values from the script, the weakest first, because the last value of a source wins."""
    given: list[Given] = []
    plan: object = script.plan  # a script may pass anything
    is_text = isinstance(plan, str | Path)
    if isinstance(plan, Mapping):
        for name, value in plan.items():
            if value is not None:
                given.append(Given(name, value, "code", f"Accelerator(plan={{{name!r}: ...}})"))
    elif isinstance(plan, Sequence) and not is_text and all(isinstance(value, Given) for value in plan):
        given += plan  # `compat` has read these from a file of another library
    elif plan is not None and not is_text:
        problems.append(
            Problem(
                "config-value",
                f"plan cannot be {plan!r}.",
                why="it comes from Accelerator(plan=...); expected: a mapping of settings, or the name of a config file",
                fix='write it as a mapping, such as plan={"shard": 2, "zero": 1}',
            )
        )
    if script.options is not None:
        given.append(Given(strategy_options.NAME, script.options, "code", "Accelerator(options=...)"))
    given += script.given()
    for value in given:
        if not _of_run(value.name) and not known_by_a_dialect(value):
            problems.append(_unknown(value))
    return given


def _read_file(path: str, given: list[Given], problems: list[Problem]) -> None:
    """Adds the values and the problems of a config file."""
    from paceline.config import files

    content = files.read(path)
    given += content.given
    problems += content.problems


def _translate(
    given: list[Given], nodes: int | None, problems: list[Problem]
) -> tuple[list[Given], list[Choice], dict[str, str]]:
    """Translates options of other libraries into Paceline's settings, and splits blocks of options into single options.

    Returns:
        The translated values; the values without effect; and environment variables, from which the objects of the other
        libraries read what was given.
    """
    unused: list[Choice] = []
    variables: dict[str, str] = {}
    for dialect in dialects():
        # A dialect returns the values that it does not know unchanged, so the next dialect still sees them.
        translation = dialect.translate(given, nodes)
        given = translation.given
        unused += translation.unused
        problems += translation.problems
        variables |= translation.variables
    values: list[Given] = []
    for value in given:
        if value.name != strategy_options.NAME:
            values.append(value)
            continue
        for option in strategy_options.read(value):
            if isinstance(option, Problem):
                problems.append(option)
            else:
                values.append(option)
    return values, unused, variables


def nodes_of(env: Mapping[str, str]) -> int:
    """Returns the number of nodes according to the variables of torchelastic or another launcher; 1 without them."""

    def number(name: str) -> int:
        # A variable without a usable number counts as missing.
        text = env.get(name, "")
        if text.isdigit() and int(text) > 0:
            return int(text)
        return 1

    if "GROUP_WORLD_SIZE" in env:
        return number("GROUP_WORLD_SIZE")
    # Only torchelastic sets the number of nodes; under other launchers it follows from the numbers of processes.
    return ceil(number("WORLD_SIZE") / number("LOCAL_WORLD_SIZE"))


def resolve_launch(flags: Sequence[Given] = (), env: Mapping[str, str] | None = None, *, search: bool = True) -> Launch:
    """Resolves the settings of `paceline launch`: those that it uses itself, and those that it passes to the run.

    Args:
        flags: the flags of the command line, as `schema.given` returns them.
        env: the environment; None stands for the environment of this process.
        search: whether the default config file is read where no file is named.

    Raises:
        ConfigError: `config-value`, those of dialects, `launcher-flag`, `procs-split`, and those of `files.read`; all
            at once.
    """
    from paceline.config import launchers  # whose flags no training process gets

    env = environment.snapshot() if env is None else env
    problems: list[Problem] = []
    unused: list[Choice] = []
    from_env = [*launchers.from_env(env), *_from_env(env, *launch_classes(), RunSettings)]
    # Only flags and variables can name the file. Some flags mean something only beside a block of it, so it is read first.
    path = _file_for([*flags, *from_env], env, search)
    content = None
    if path is not None:
        from paceline.config import files

        content = files.read(path, flags)
    consumed: set[str] = set() if content is None else content.consumed
    given = _from_flags([flag for flag in flags if flag.name not in consumed], unused, problems)
    given += from_env
    if content is not None:
        given += content.given
        unused += content.unused
        problems += content.problems
    values, decisions = _merge(LaunchSettings, given, problems)
    cluster: dict[str, Any] = {}
    for name in CLUSTERS.names():
        cls = CLUSTERS.get(name)
        own_values, own_decisions = _merge(cls, given, problems)
        cluster[name] = cls(**own_values)
        decisions += own_decisions
    # Some options of other libraries mean something only together with the number of nodes, so the launcher's own settings
    # are merged before the options of the run are translated. A range such as 2:4 is no number, so they must do without it.
    fixed_nodes = values["nodes"] if isinstance(values["nodes"], int) else None
    given, without_effect, variables = _translate(given, fixed_nodes, problems)
    run_values, run_decisions = _merge(RunSettings, given, problems)
    decisions = _per_node(values, decisions, problems)
    _raise(problems)
    unused_notices = []
    for choice in unused:
        notice = notice_of(choice)
        if notice:
            unused_notices.append(notice)
    notices = (*unused_notices, *_notices(without_effect), *_unknown_variables(env))
    rows = decisions + run_decisions
    return Launch(
        LaunchSettings(**values),
        RunSettings.of(run_values),
        rows,
        (*unused, *without_effect),
        notices,
        path,
        variables,
        cluster,
    )


def _from_flags(flags: Sequence[Given], unused: list[Choice], problems: list[Problem]) -> list[Given]:
    """Returns the values of the command line. Flags of other libraries that have a meaning only together come first."""
    from paceline.config import launchers

    together = Translation()
    for dialect in dialects():
        together.add(dialect.from_flags(flags))
    given = list(together.given)
    unused += together.unused
    problems += together.problems
    for flag in flags:
        if own_name(flag.name) or known_by_a_dialect(flag):
            given.append(flag)
        elif flag.name not in together.consumed:
            # Another launcher's flag may be an error here, or it may be accepted although it has no effect.
            verdict = launchers.refusal(flag) or judged(flag) or _unknown(flag)
            if isinstance(verdict, Problem):
                problems.append(verdict)
            else:
                unused.append(verdict)
    return given


def hand_over(decisions: Iterable[Choice]) -> str:
    """Returns as JSON what the command line and the file say about the run: {setting: [value, source, where]}."""
    rows = {}
    for row in decisions:
        if _of_run(row.field) and row.source in ("command line", "file"):
            rows[row.field] = [row.value, row.source, row.where]
    # YAML can hold dates, which JSON cannot. No option takes a date, so it may become text here.
    return json.dumps(rows, default=str)


def _of_run(name: str) -> bool:
    """Returns whether a name is a setting of the run, or a single option of a strategy, such as `options.shard.reshard`."""
    return name in settings_of(RunSettings) or name.startswith(f"{strategy_options.NAME}.")


def _handed(text: str) -> list[Given]:
    try:
        rows = json.loads(text) if text else {}
        handed = []
        for name, (value, source, where) in rows.items():
            # The variable may come from a launcher of another release, with settings that this one does not have.
            if _of_run(name) and source in SOURCES and value is not None:
                handed.append(Given(name, value, source, where))
        return handed
    # ValueError: no JSON, or a row without three parts. TypeError, AttributeError: JSON of another form.
    except (ValueError, TypeError, AttributeError):
        raise ConfigError(
            "settings-handed",
            f"{HANDED} cannot be read.",
            why=f"it holds {text[:80]!r}, where `paceline launch` writes JSON: {{setting: [value, source, where]}}",
            fix=f"unset {HANDED}: it is for `paceline launch` to write",
        ) from None


def _from_env(env: Mapping[str, str], *classes: type) -> list[Given]:
    """Returns the variables that are set and not empty. Paceline's own come last, so that they override other libraries'."""
    given: list[Given] = []
    if RunSettings in classes:
        for dialect in dialects():
            given += dialect.from_env(env)
    for setting in settings_of(*classes).values():
        for variable in (*reversed(setting.other_variables), setting.variable):
            if env.get(variable):
                given.append(Given(setting.name, env[variable], "environment", variable))
    return given


def _merge(cls: type, given: Sequence[Given], problems: list[Problem]) -> tuple[dict[str, Any], tuple[Choice, ...]]:
    """Parses every value, and takes for each setting the one of the strongest source (the last one within a source)."""
    given_by_setting: dict[str, list[Given]] = {}
    # Python's sort is stable, so values of the same source stay in their order.
    for value in sorted(given, key=lambda value: value.strength):
        given_by_setting.setdefault(own_name(value.name), []).append(value)
    values: dict[str, Any] = {}
    choices: list[Choice] = []
    for name, setting in settings_of(cls).items():
        if name == strategy_options.NAME:
            continue
        choice = Choice(name, setting.default)
        # All values are parsed, also those that a stronger source overrides: a wrong value is an error wherever it stands.
        for candidate in given_by_setting.get(name, ()):
            try:
                parsed = setting.kind.read(candidate.value)
            except ValueError as error:
                problems.append(_bad_value(candidate, str(error), setting.default))
                continue
            instead = f"instead of {choice.value} ({choice.where})" if choice.where else ""
            choice = Choice(name, parsed, candidate.source, candidate.where, instead)
            # `num_processes` counts the processes of all nodes, and `_per_node` divides it when the number of nodes is
            # known. If `procs` is given too, the one from the stronger source counts.
            if candidate.name == TOTAL:
                values[TOTAL] = parsed
            elif name == "procs":
                values.pop(TOTAL, None)
        values[name] = choice.value
        choices.append(choice)
    if strategy_options.NAME in settings_of(cls):
        values[strategy_options.NAME], option_choices = strategy_options.merge(given)
        choices += option_choices
    return values, tuple(choices)


def _per_node(values: dict[str, Any], decisions: tuple[Choice, ...], problems: list[Problem]) -> tuple[Choice, ...]:
    """Replaces a number of processes over all nodes by the number on each node, which `procs` holds."""
    total = values.pop(TOTAL, None)
    nodes = values["nodes"]
    # "auto" is no number to divide, and on one node both numbers are the same.
    if not isinstance(total, int) or nodes == 1:
        return decisions
    by_field = {choice.field: choice for choice in decisions}
    row = by_field["procs"]
    nodes_source = by_field["nodes"].where or by_field["nodes"].source
    if not isinstance(nodes, int):
        problems.append(
            Problem(
                "procs-split",
                f"{total} processes cannot be divided over {nodes} nodes, because their number may change.",
                f"num_processes={total} ({row.where}) counts all nodes together; nodes={nodes} ({nodes_source})",
                "leave num_processes out and set --procs, which counts for each node",
            )
        )
        return decisions
    procs, remainder = divmod(total, nodes)
    if remainder:
        problems.append(
            Problem(
                "procs-split",
                f"{total} processes cannot be divided equally over {nodes} nodes.",
                f"num_processes={total} ({row.where}) counts all nodes together; nodes={nodes} ({nodes_source})",
                f"set num_processes to {(procs + 1) * nodes}, or say --procs, which counts for each node",
            )
        )
    values["procs"] = procs
    # A key that is there already keeps its place in a dictionary, so the rows stay in the order of definition.
    by_field["procs"] = Choice("procs", procs, row.source, row.where, f"{total} over all {nodes} nodes")
    return tuple(by_field.values())


def _file_for(given: Sequence[Given], env: Mapping[str, str], search: bool) -> str | None:
    """Returns the config file that the strongest source names; otherwise the default file, if it exists."""

    def strongest(name: str) -> str | None:
        candidates = [value for value in given if own_name(value.name) == name]
        if not candidates:
            return None
        # Python's sort is stable, so the last value of the strongest source comes last.
        candidates.sort(key=lambda value: value.strength)
        return str(candidates[-1].value)

    config_choice = strongest("config")
    if config_choice is not None or not search:
        return config_choice
    from paceline.config.places import default_file

    return default_file(env, compat=strongest("compat"))


def _unknown_variables(env: Mapping[str, str]) -> tuple[str, ...]:
    variables = set(environment.TABLE)
    variables.update(setting.variable for setting in settings_of().values())
    notices = []
    for name in sorted(env):
        if name.startswith("PACELINE_") and name not in variables:
            close = nearest(name, variables)
            advice = f"is {close} meant?" if close else "unset it."
            notices.append(f"{name} is no variable of Paceline; {advice}")
    return tuple(notices)


def _unknown(given: Given) -> Problem:
    close = nearest(given.name, settings_of())
    return Problem(
        "config-key",
        f"there is no setting {short_repr(given.name)}.",
        f"it stands in {given.where}",
        f"write {close!r}" if close else "`paceline explain` lists all settings",
    )


def _bad_value(given: Given, expected: str, default: object) -> Problem:
    otherwise = f" (then {default})" if default is not None else ""
    return Problem(
        "config-value",
        f"{given.name} cannot be {short_repr(given.value)}.",
        f"it comes from {given.where}; expected: {expected}",
        f"give {given.where} such a value, or leave it out{otherwise}",
    )


def _notices(unused: Sequence[Choice]) -> list[str]:
    """Returns the notices of all dialects about values that their `translate` found to be without effect."""
    notices: list[str] = []
    for dialect in dialects():
        notices += dialect.notices(unused)
    return notices


def _raise(problems: Sequence[Problem]) -> None:
    if problems:
        raise ConfigError.of(problems)
