#!/bin/sh
# What `make hosts` needs to make hosts of its own (Debian, Ubuntu; as root). Run again, it does nothing.
set -eu
missing=
command -v sshd >/dev/null || test -x /usr/sbin/sshd || missing="$missing openssh-server"
command -v ssh >/dev/null || missing="$missing openssh-client"
command -v tc >/dev/null || test -x /usr/sbin/tc || test -x /sbin/tc || missing="$missing iproute2"
command -v unshare >/dev/null || missing="$missing util-linux"
command -v mpirun >/dev/null || missing="$missing openmpi-bin"
command -v srun >/dev/null || missing="$missing slurm-wlm"
command -v munged >/dev/null || test -x /usr/sbin/munged || missing="$missing munge"
command -v iptables >/dev/null || test -x /usr/sbin/iptables || missing="$missing iptables"
ls /usr/lib/*/faketime/libfaketime.so.1 >/dev/null 2>&1 || missing="$missing libfaketime"
command -v etcd >/dev/null || missing="$missing etcd-server"
test -n "$missing" || exit 0
apt-get update -qq
# shellcheck disable=SC2086  # a list of names
DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends $missing
