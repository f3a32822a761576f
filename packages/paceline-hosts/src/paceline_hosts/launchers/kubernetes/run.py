"""`pod_run` turns a job into what the pods run: the command, the variables and the name. It reads two files."""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from paceline.base.errors import ConfigError, Problem
from paceline.config.settings import settings_of
from paceline.config.sources import HANDED, Launch
from paceline.launch.job import Job
from paceline_hosts.assignment import assignment_of
from paceline_hosts.clusters.kubernetes import KubernetesSettings
from paceline_hosts.launchers.kubernetes import values as values_file
from paceline_hosts.launchers.kubernetes.values import ManifestValues
from paceline_hosts.launchers.launch_flags import flags_of
from paceline_hosts.network.tls import contents_for_run

NO_PACELINE = 127  # the exit code of a shell for a command that does not exist
SCRIPT_FOLDER = "/paceline/script"
TLS_FOLDER = "/paceline/tls"
_TLS_FILES = ("tls.crt", "tls.key", "ca.crt")
_PORT = 29500
_LONGEST_NAME = 40  # the names of pods begin with it, and have 63 characters at most
_LARGEST_SCRIPT = 512 * 1024  # a ConfigMap holds 1 MiB
# Settings that are not flags of the command in the pod: they are for the submission, or each pod gets them in another way.
OF_SUBMISSION = {
    "config", "dry_run", "exclude", "hostfile", "include", "launcher", "launcher_args", "main_address", "main_port",
    "gpus_per_node", "max_restarts", "module", "no_python", "node_rank", "nodes", "procs", "ssh_port", "tls", "wait",
    *settings_of(KubernetesSettings),
}  # fmt: skip
FIRST_WORDS = f"""\
import importlib.util, runpy, sys
if importlib.util.find_spec("paceline") is None:
    print("paceline: this image has no paceline for", sys.executable, file=sys.stderr)
    sys.exit({NO_PACELINE})
runpy.run_module("paceline", run_name="__main__", alter_sys=True)
"""


@dataclass(frozen=True)
class PodRun:
    """The values from which the manifests of a run are made.

    Attributes:
        name: the name of the run and of every object that is created for it.
        namespace: the namespace of these objects; "" for that of the context.
        image: the image of the containers.
        nodes: how many pods there are.
        procs: how many processes each pod starts.
        gpus: how many devices each pod has.
        words: the arguments of `paceline` in the container.
        port: the port at which pod 0 listens.
        env: variables in the manifest, which everybody may read who may read pods.
        secrets: variables in the Secret.
        tls: files of the Secret with which the launchers encrypt, by name; {} for none.
        script: the text of the script, if it is sent with the run; "" if the image has the script.
        script_name: the file name of that script.
        notice: what the user should know about the script; "" for nothing.
        max_restarts: how often all pods are started again.
        grace_s: seconds that a pod has to save.
        queue: Kueue's queue; "" for none.
        values: what the values file says.
    """

    name: str
    namespace: str
    image: str
    nodes: int
    procs: int
    gpus: int
    words: tuple[str, ...]
    port: int = _PORT
    env: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    tls: Mapping[str, str] = field(default_factory=dict, repr=False)
    script: str = field(default="", repr=False)
    script_name: str = ""
    notice: str = ""
    max_restarts: int = 0
    grace_s: float = 30.0
    queue: str = ""
    values: ManifestValues = field(default_factory=ManifestValues)


def pod_run(job: Job) -> PodRun:
    """Returns the run of a job.

    Raises:
        ConfigError: `host-flags`, `kubernetes-values`, `kubernetes-image`, `kubernetes-script`.
        LaunchError: `launch-tls`.
    """
    assignment = assignment_of(job)
    cluster = job.cluster
    settings = assignment.settings
    _without_effect(job)
    if not cluster.image:
        raise ConfigError(
            "kubernetes-image",
            "there is no image for the pods.",
            why="--image is not set",
            fix="say --image IMAGE: one that holds Python, torch, Paceline and what the script imports",
        )
    target = job.target
    script, not_sent = script_to_send(target.kind, target.name, cluster.script_from)
    script_name = Path(target.name).name if script else ""
    target_in_pod = f"{SCRIPT_FOLDER}/{script_name}" if script else target.name
    notice = ""
    if not_sent and cluster.script_from == "auto" and target.kind == "script":
        # The name may be misspelt. Without this notice the user would only learn that from a pod, after a wait in a queue.
        notice = f"{target.name} has to be in the image: {not_sent}."
    switches = {"module": ("--module",), "program": ("--no-python",)}.get(target.kind, ())
    tls, tls_flags = tls_of(settings.launch.tls)
    flags = [*flags_of(settings, OF_SUBMISSION), *tls_flags]
    if "--tee" not in flags:
        flags += ["--tee", "3"]  # the lines of all ranks come together in one log
    words = ("launch", *flags, *switches, target_in_pod, *target.args)
    return PodRun(
        name=name_of(target.name, assignment.secret),
        namespace=cluster.namespace or "",
        image=cluster.image,
        nodes=job.nodes,
        procs=job.procs,
        gpus=settings.launch.gpus_per_node or 0,
        words=words,
        port=job.main_port or _PORT,
        env=variables_of(settings),
        secrets={**forwarded_to_pods(assignment.env), "PACELINE_RUN_SECRET": assignment.secret},
        tls=tls,
        script=script,
        script_name=script_name,
        notice=notice,
        max_restarts=settings.launch.max_restarts,
        grace_s=job.grace_s,
        queue=cluster.queue or "",
        values=values_file.read(cluster.values) if cluster.values else ManifestValues(),
    )


def _without_effect(job: Job) -> None:
    """Refuses settings that the user has given and that have no effect in a cluster.

    Raises:
        ConfigError: `host-flags`, all at once.
    """
    settings = assignment_of(job).settings
    launch, given = settings.launch, settings.given
    reasons = {
        "main_address": "pod 0 is where the others find it",
        "launcher_args": "pods are described by the file of --values",
    }
    problems = []
    for name, why in reasons.items():
        if name in given:
            what = f"{name} has no meaning in a cluster of Kubernetes: {why}."
            problems.append(Problem("host-flags", what, f"{getattr(launch, name)} ({given[name]})", "leave it out"))
    if isinstance(launch.nodes, str):
        what = "the number of pods cannot be a range: when one is lost, the cluster starts all again."
        why = f"nodes={launch.nodes} ({given['nodes']})"
        problems.append(Problem("host-flags", what, why, "give one number, and --max-restarts"))
    if job.target.local_rank:
        what = "the script would have to get --local_rank=N before its arguments, which it does not in pods."
        fix = "paceline launch --on kubernetes, with --compat where the script needs it"
        problems.append(Problem("host-flags", what, "this command starts its scripts so", fix))
    if problems:
        raise ConfigError.of(problems)


def name_of(target: str, secret: str) -> str:
    """Returns a name for the run: the script's, and five characters of a hash of the run's secret, which make it unique."""
    # Names of objects have small letters, digits and hyphens, and begin with a letter.
    stem = re.sub(r"[^a-z0-9]+", "-", Path(target).stem.lower()).strip("-")
    if not stem[:1].isalpha():
        stem = f"run-{stem}".strip("-")
    digest = hashlib.sha256(secret.encode()).hexdigest()
    return f"{stem[: _LONGEST_NAME - 6].strip('-')}-{digest[:5]}"


def tls_of(setting: str) -> tuple[dict[str, str], tuple[str, ...]]:
    """Returns the files that are sent for `--tls`, by name, and the flag for the command in the pod.

    The certificate of `--tls yes` is created here, because an image need not have `openssl`. If none of the named files
    exists on this host, they are those of the image, or of a volume.

    Raises:
        LaunchError: `launch-tls`.
    """
    if setting == "no":
        return {}, ()
    if setting != "yes" and not any(Path(path).is_file() for path in setting.split(",")):
        return {}, ("--tls", setting)
    files = dict(zip(_TLS_FILES, contents_for_run(setting), strict=False))
    return files, ("--tls", ",".join(f"{TLS_FOLDER}/{name}" for name in files))


def variables_of(settings: Launch) -> dict[str, str]:
    """Returns variables of other libraries, from which their objects in the script read the settings of this command."""
    variables = {"PYTHONUNBUFFERED": "1", **settings.hand_over()}
    del variables[HANDED]  # the command in the pod writes it anew, from its flags
    return variables


def forwarded_to_pods(env: Mapping[str, str]) -> dict[str, str]:
    """Returns those variables for other hosts that also make sense in an image.

    Variables of settings are left out, because they are flags already; those of Python name folders of this machine.
    """
    of_settings = {setting.variable for setting in settings_of().values()}
    of_this_host = {"PACELINE_RUN_SECRET_FILE", *of_settings}
    return {name: env[name] for name in env if name not in of_this_host and not name.startswith("PYTHON")}


def script_to_send(kind: str, name: str, source: str) -> tuple[str, str]:
    """Returns the text of a script to send with the run; or "", and why the image must have the script.

    Args:
        kind: the kind of the target: "script", "module" or "program".
        name: the script, as the user wrote it.
        source: "here" to send it, "image" not to, or "auto": it is sent if it is in this folder and imports no module
            beside it.

    Raises:
        ConfigError: `kubernetes-script`, if `source` is "here" and the script cannot be sent.
    """
    path = Path(name)
    why = ""
    text = ""
    if source == "image":
        why = "--script-from image"
    elif kind != "script":
        why = f"a {kind} is no file"
    elif source == "auto" and path.is_absolute():
        why = "its path is absolute"
    elif not path.is_file():
        why = f"there is no file {path.absolute()}"
    elif path.stat().st_size > _LARGEST_SCRIPT:
        why = f"it has {path.stat().st_size:,} bytes; at most {_LARGEST_SCRIPT:,} go along"
    else:
        text = path.read_text(encoding="utf-8", errors="replace")
        beside = neighbours(path, text) if source == "auto" else []
        if beside:
            why = f"it imports {', '.join(beside)} beside it"
    if why and source == "here":
        fix = "put it into the image and say --script-from image"
        raise ConfigError("kubernetes-script", f"{name} cannot go along with the run.", why, fix)
    return ("", why) if why else (text, "")


def neighbours(path: Path, text: str) -> list[str]:
    """Returns the modules beside a script that it imports, and without which it would not run."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return []  # the pod will show this error with its line
    imported: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            imported.add(node.module.partition(".")[0])
    # A package is a folder beside the script, and a module is a file.
    beside = []
    for name in sorted(imported):
        place = path.with_name(name)
        if place.is_dir() or place.with_name(f"{name}.py").is_file():
            beside.append(name)
    return beside
