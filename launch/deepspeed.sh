#!/usr/bin/env bash
# Several nodes that the first one reaches by ssh without a password; needs pdsh on the first. The folder and its environment
# have the same path on all of them; what is in ./.deepspeed_env or ~/.deepspeed_env is exported on all (deepspeed_env.example).
#   HOSTFILE=launch/hostfile bash launch/deepspeed.sh train --recipe ds_configs/recipes/quickstart.json
# DEEPSPEED="--include gpu01@gpu02:0,1" and the like go to the launcher.
set -euo pipefail
[ -d .venv ] && PATH="$PWD/.venv/bin:$PATH"
HOSTFILE=${HOSTFILE:-launch/hostfile}
# without --force_multi deepspeed would start a node that is alone on this machine, whatever its name
words="--force_multi ${SSH_PORT:+--ssh_port $SSH_PORT} ${DEEPSPEED:-}"
python -m wandistiller doctor --hostfile "$HOSTFILE" --deepspeed="$words" # one message if a node is wrong
exec deepspeed --hostfile "$HOSTFILE" $words --module wandistiller "$@"
