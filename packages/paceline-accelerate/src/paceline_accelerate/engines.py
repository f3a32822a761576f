"""Translates what accelerate's users say about its engines (FSDP, ParallelismConfig, dynamo) into Paceline's settings.

The dialect calls it for flags, variables and files, and the accelerator for the plugins of a script:

--fsdp_*, fsdp_config:, FSDP_*, FullyShardedDataParallelPlugin(...)
    -> Given("fsdp_sharding_strategy", "SHARD_GRAD_OP", source, where)
    -> a case of `engine_fields.FIELDS`
    -> Given("zero", 2, source, where), or why it has no effect, or a problem
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from paceline.base.errors import Problem, short_repr
from paceline.config.dialects import Translation
from paceline.config.given import SOURCES, Choice, Given
from paceline_accelerate.engine_fields import ASKS_NOTHING, FIELDS, ROWS, Field
from paceline_doors.cases import NODES, VALUE, Case, fits, word

# Defaults that accelerate's launcher puts into the environment. The sharding strategy is not among them, because a default in
# the environment would override what a config file says.
_FSDP_DEFAULTS = {
    "FSDP_VERSION": "1",
    "FSDP_OFFLOAD_PARAMS": "false",
    "FSDP_MIN_NUM_PARAMS": "100000000",
    "FSDP_FORWARD_PREFETCH": "false",
    "FSDP_USE_ORIG_PARAMS": "true",
    "FSDP_SYNC_MODULE_STATES": "true",
    "FSDP_ACTIVATION_CHECKPOINTING": "false",
}
# If this is set, transformers leaves weights empty on all ranks but the first; here every rank builds the whole model.
_NEVER_SET = "FSDP_CPU_RAM_EFFICIENT_LOADING"


def field_of(given: Given) -> Field | None:
    """Returns the row of the table for a value's name; None if no engine has such a field."""
    name = given.name
    if name == "distributed_type" and word(given.value) == "fsdp":
        name = "use_fsdp"
    return FIELDS.get(name)


def from_env(env: Mapping[str, str]) -> list[Given]:
    """Reads accelerate's variables that are set and not empty; those of FSDP only if FSDP is switched on."""
    uses_fsdp = word(env.get("ACCELERATE_USE_FSDP", "")) in ("true", "1", "yes")
    given = []
    for row in ROWS:
        is_of_fsdp = row.variable.startswith(("FSDP_", "ACCELERATE_USE_FSDP"))
        if env.get(row.variable) and (uses_fsdp or not is_of_fsdp):
            given.append(Given(row.name, env[row.variable], "environment", row.variable))
    return given


def translate(given: Iterable[Given], nodes: int | None) -> Translation:
    """Translates values into Paceline's settings; values that belong to no engine are kept unchanged.

    Args:
        given: values of any source.
        nodes: number of nodes; None if it may change while the run lasts.
    """
    translation = Translation()
    said: dict[str, Given] = {}
    # Of several values of one field the last in this order counts, so weaker sources come first.
    for value in sorted(given, key=lambda value: SOURCES.index(value.source)):
        row = field_of(value)
        if row is None:
            translation.given.append(value)
        else:
            text = "true" if value.name == "distributed_type" else value.value
            said[row.name] = Given(row.name, text, value.source, value.where)
    for row in ROWS:
        if row.name in said:
            _translate(row, said, nodes, translation)
    translation.variables = variables_of_said(said)
    divides: list[Given] = []
    for name in ("parallelism_config_cp_size", "parallelism_config_sp_size"):
        if name in said and word(said[name].value) not in ("1", "none"):
            divides.append(said[name])
    if len(divides) > 1:
        what = "cp_size and sp_size both divide sequences."
        why = "; ".join(map(str, divides))
        translation.problems.append(Problem("accelerate-feature", what, why, "set one of them to 1"))
    return translation


def _translate(row: Field, said: Mapping[str, Given], nodes: int | None, translation: Translation) -> None:
    """Records what becomes of one field: settings, a reason why it has no effect, or a problem."""
    given = said[row.name]
    missing = [need for need in row.needs if not _met(need, said)]
    if missing:
        translation.unused.append(_unused(given, f"it counts only together with {missing[0].replace('=', ' ')}"))
        return
    case = next((case for case in row.cases if fits(case, given.value)), None)
    if case is None:
        expected = ", ".join(case.value.replace("|", ", ") for case in row.cases)
        what = f"{row.name} cannot be {short_repr(given.value)}."
        why = f"it comes from {given.where}; expected: {expected}"
        fix = f"give {given.where} such a value, or leave it out"
        translation.problems.append(Problem("config-value", what, why, fix))
    elif case.fix:
        what = f"{row.name} {given.value} is not supported."
        translation.problems.append(Problem("accelerate-feature", what, f"{given.where}: {case.why}", case.fix))
    elif not case.means:
        translation.unused.append(_unused(given, case.why))
    elif any(name in said for name in case.unless):
        return
    elif nodes is None and NODES in case.means.values():
        what = f"{row.name} {given.value} needs a fixed number of nodes."
        why = f"{given.where}: each node has a copy of the model, and the number of nodes may change"
        fix = "give one number of nodes, or use FULL_SHARD"
        translation.problems.append(Problem("accelerate-feature", what, why, fix))
    else:
        for name, value in case.means.items():
            setting = _value(value, given.value, nodes)
            translation.given.append(Given(name, setting, given.source, given.where))


def variables_of_said(said: Mapping[str, Given]) -> dict[str, str]:
    """Returns accelerate's variables for what flags and files say; plugins and transformers read them in the script.

    Args:
        said: the value of each field that somebody has given.
    """
    uses_fsdp = "use_fsdp" in said and word(said["use_fsdp"].value) == "true"
    variables = dict(_FSDP_DEFAULTS) if uses_fsdp and said["use_fsdp"].source != "environment" else {}
    for name, given in said.items():
        row = FIELDS[name]
        is_idle = row.variable.startswith(("FSDP_", "ACCELERATE_USE_FSDP")) and not uses_fsdp
        # A value that comes from the environment is set there already.
        is_new = given.source in ("command line", "file")
        if not row.variable or not is_new or is_idle:
            variables.pop(row.variable, None)
            continue
        is_switch = isinstance(given.value, bool) or name == "use_fsdp"
        variables[row.variable] = str(given.value).lower() if is_switch else str(given.value)
        if name.startswith("parallelism_config_"):
            variables["ACCELERATE_USE_PARALLELISM_CONFIG"] = "true"
    variables.pop(_NEVER_SET, None)
    return variables


def variables_of(unused: Sequence[Choice]) -> dict[str, str]:
    """Returns the FSDP_* variables of values that have no effect here and do not come from the environment."""
    variables: dict[str, str] = {}
    for choice in unused:
        row = FIELDS.get(choice.field)
        if row is None or choice.source == "environment":
            continue
        if row.variable.startswith("FSDP_") and row.variable != _NEVER_SET:
            variables[row.variable] = str(choice.value)
    return variables


def notices(unused: Sequence[Choice]) -> tuple[str, ...]:
    """Returns one sentence on values that have no effect although somebody asked for them; defaults are not mentioned."""
    texts = []
    for row in unused:
        if row.field not in FIELDS or row.reason.endswith(ASKS_NOTHING):
            continue
        defaults = FIELDS[row.field].default.lower().split("|")
        if word(row.value) not in defaults:
            texts.append(f"{row.field} ({row.where}): {row.reason.removeprefix('no effect here: ')}")
    return (f"no effect here: {'; '.join(texts)}.",) if texts else ()


def _value(setting: object, given_value: object, nodes: int | None) -> Any:
    """Replaces the placeholders of a case: NODES by the number of hosts, and VALUE by the value that was given."""
    if setting is NODES:
        return nodes
    if setting is VALUE:
        return given_value.strip() if isinstance(given_value, str) else given_value
    return setting


def _met(need: str, said: Mapping[str, Given]) -> bool:
    """Whether a field has one of the values that another one needs, such as "dynamo_backend=inductor|eager"."""
    name, _, wanted = need.partition("=")
    return name in said and fits(Case(wanted), said[name].value)


def _unused(given: Given, why: str) -> Choice:
    return Choice(given.name, given.value, given.source, given.where, f"no effect here: {why}")
