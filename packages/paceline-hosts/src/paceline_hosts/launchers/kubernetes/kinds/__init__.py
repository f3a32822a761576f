"""The kinds of Kubernetes objects that can run the pods of a run, one file each. `--kind` names one of them.

jobset       JobSet, with its own headless service: the default
trainjob     Kubeflow's TrainJob (v2), with a TrainingRuntime of its own
pytorchjob   Kubeflow's PyTorchJob (v1)
job          an Indexed Job and a headless service: every cluster has these
"""

from __future__ import annotations

from collections.abc import Mapping

from paceline_hosts.launchers.kubernetes.kinds.job import IndexedJob
from paceline_hosts.launchers.kubernetes.kinds.jobset import JobSet
from paceline_hosts.launchers.kubernetes.kinds.kind import WorkloadKind
from paceline_hosts.launchers.kubernetes.kinds.pytorchjob import PyTorchJob
from paceline_hosts.launchers.kubernetes.kinds.trainjob import TrainJob

# The launcher uses the first of these that the cluster has, unless `--kind` names another one.
KINDS: Mapping[str, WorkloadKind] = {kind.name: kind for kind in (JobSet(), TrainJob(), PyTorchJob(), IndexedJob())}
