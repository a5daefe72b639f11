#!/usr/bin/env bash
# One process, on the first GPU or the CPU:
#   bash launch/one_process.sh train --recipe ds_configs/recipes/quickstart.json
set -euo pipefail
[ -d .venv ] && PATH="$PWD/.venv/bin:$PATH"
exec python -m wandistiller "$@"
