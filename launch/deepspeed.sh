#!/usr/bin/env bash
# Several nodes that the first one reaches by ssh without a password; needs pdsh on the first. The folder and its environment
# have the same path on all of them; what is in ./.deepspeed_env or ~/.deepspeed_env is exported on all (deepspeed_env.example).
#   HOSTFILE=launch/hostfile bash launch/deepspeed.sh train --recipe ds_configs/recipes/quickstart.json
# DEEPSPEED="--include gpu01@gpu02:0,1" and the like go to the launcher.
set -euo pipefail
[ -d .venv ] && PATH="$PWD/.venv/bin:$PATH"
. "$(dirname "$0")/hostfile.sh"
# without --force_multi it would start a single remaining node on this machine, whatever its name
exec deepspeed --hostfile "$HOSTFILE" --force_multi ${SSH_PORT:+--ssh_port "$SSH_PORT"} ${DEEPSPEED:-} \
  --module wandistiller "$@"
