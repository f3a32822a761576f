"""Writes the manifests as text, which `--dry-run` prints and `kubectl apply -f -` accepts."""

from __future__ import annotations

import yaml

from paceline_hosts.launchers.kubernetes.kinds.kind import SECRETS, WorkloadKind
from paceline_hosts.launchers.kubernetes.pod import Manifest, tls_name
from paceline_hosts.launchers.kubernetes.run import PodRun


class _Blocks(yaml.SafeDumper):
    """Writes texts of several lines as blocks, so that a program in a manifest is readable, and uses no anchors."""

    def ignore_aliases(self, data: object) -> bool:
        """Returns True: a value that occurs twice is written twice, because anchors make a manifest hard to read."""
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Blocks.add_representer(str, _text)


def document(run: PodRun, kind: WorkloadKind) -> str:
    """Returns all manifests of a run as text.

    Of the Secret it only has the names, because its values are created for one submission and must not be shown.
    """
    objects = [*(manifest for _, manifest in kind.before(run)), kind.main(run)]
    objects += [manifest for resource, manifest in kind.beside(run) if resource is not SECRETS]
    names = ", ".join(sorted(run.secrets))
    namespace = f" -n {run.namespace}" if run.namespace else ""
    remark = (
        f"# The Secret {run.name} ({names}) is made when the run is submitted. To apply these manifests by hand, make it:\n"
        f"# kubectl create secret generic {run.name}{namespace} --from-literal=PACELINE_RUN_SECRET=$(openssl rand -hex 32)\n"
    )
    if run.notice:
        remark = f"# {run.notice}\n{remark}"
    if run.tls:
        files = " ".join(f"--from-file={name}" for name in run.tls)
        remark += (
            f"# The Secret {tls_name(run)} too, from files of these names (without a CA of your own, ca.crt is tls.crt):\n"
            f"# kubectl create secret generic {tls_name(run)}{namespace} {files}\n"
        )
    return remark + "---\n".join(_yaml(manifest) for manifest in objects)


def _yaml(manifest: Manifest) -> str:
    text: str = yaml.dump(manifest, Dumper=_Blocks, sort_keys=False, width=1000)
    return text
