# Sourced by the scripts here: makes .venv with pinned versions (once), builds DeepSpeed's CPU Adam, counts the ranks.
# PYTHON=python3.12 picks an interpreter. Needs a C++ compiler (Debian: apt install g++).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3}
if [ -z "${PYTHON-}" ] && .venv/bin/python -V >/dev/null 2>&1; then python=.venv/bin/python; fi
fits() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; }
fits "$python" || {
  is=$("$python" -V 2>/dev/null || echo "no interpreter here")
  echo "error: $python is $is. Python 3.11 to 3.13 is needed, as the pinned libraries have releases for these alone." >&2
  for other in python3.{13,12,11} "$HOME"/.pyenv/versions/3.1[123].*/bin/python /opt/*/bin/python3; do
    if fits "$other"; then echo "Type: PYTHON=$other bash $0" >&2; exit 2; fi
  done
  echo "Install one (Debian, Ubuntu: apt install python3.12 python3.12-venv), then type: PYTHON=python3.12 bash $0" >&2
  exit 2
}
command -v g++ >/dev/null || { echo "A C++ compiler is missing; on Debian or Ubuntu: apt install g++" >&2; exit 2; }

gpus="" # CUDA_VISIBLE_DEVICES= hides them
if [ "${CUDA_VISIBLE_DEVICES-all}" != "" ] && nvidia-smi -L >/dev/null 2>&1; then gpus=yes; fi
if [ "$gpus" ]; then # before gigabytes are fetched: torch 2.13.0 of PyPI is built for CUDA 13
  if [[ ${CUDA_VISIBLE_DEVICES-} =~ [^0-9,] ]]; then
    echo "error: CUDA_VISIBLE_DEVICES is $CUDA_VISIBLE_DEVICES, and deepspeed takes numbers alone; nvidia-smi -L shows them." >&2
    exit 2
  fi
  IFS=", " read -r driver capability < <(nvidia-smi --query-gpu=driver_version,compute_cap --format=csv,noheader | sort -t, -k2 | head -n 1)
  if [ -z "${TORCH_INDEX-}" ] && { ((${driver%%.*} < 580)) || ((${capability/./} < 75)); }; then
    echo "error: CUDA 13 of torch 2.13.0 needs a driver from 580 on and GPUs of compute capability 7.5 or more; here are $driver and $capability." >&2
    echo "Update the driver; or name an index with torch 2.13.0 for an older CUDA: TORCH_INDEX=https://download.pytorch.org/whl/cu126 bash $0" >&2
    echo "or leave the GPUs out: CUDA_VISIBLE_DEVICES= bash $0" >&2
    exit 2
  fi
  torch_index=(${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"})
else
  torch_index=(--extra-index-url https://download.pytorch.org/whl/cpu) # a build without gigabytes of CUDA
  export DS_ACCELERATOR=cpu OMP_WAIT_POLICY=PASSIVE OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((($(nproc) + 1) / 2))}
fi

wanted="$(cat setup.py launch/requirements.txt | cksum) $("$python" -V)"
if [ "$(cat .venv/wanted 2>/dev/null)" != "$wanted" ]; then
  echo "installing into .venv with $("$python" -V) (a few minutes, once)"
  if [ "$python" != .venv/bin/python ]; then "$python" -m venv --clear .venv; fi
  .venv/bin/pip install -q --upgrade pip
  # torch first and alone: anything else would pull another build of it. Files are compiled when they are imported, few of all
  .venv/bin/pip install -q --no-compile --retries 2 --no-deps torch==2.13.0 "${torch_index[@]}"
  .venv/bin/pip install -q --no-compile -r launch/requirements.txt -e .
  echo "$wanted" >.venv/wanted
fi
RANKS=2
if [ "$gpus" ]; then RANKS=$(.venv/bin/python -c 'import torch; print(torch.cuda.device_count() or 2)'); fi
while ((16 % RANKS)); do ((RANKS--)); done # what the batch of the quick start can be shared among
here=(--num_gpus "$RANKS") # for which `deepspeed` ignores CUDA_VISIBLE_DEVICES (0.19.8)
if [ "$gpus" ] && [ "${CUDA_VISIBLE_DEVICES-}" ]; then
  here=(--include "localhost:$(cut -d, -f"1-$RANKS" <<<"$CUDA_VISIBLE_DEVICES")")
fi
export PATH="$PWD/.venv/bin:$PATH"
TORCH_EXTENSIONS_DIR=$(python -c 'import os; from wandistiller.cli.process import set_defaults as s; s(os.environ); print(os.environ["TORCH_EXTENSIONS_DIR"])')
export TORCH_EXTENSIONS_DIR

build() { # one of DeepSpeed's C++ parts, once: NAME BUILDER WHAT
  [ -f "$TORCH_EXTENSIONS_DIR/$1/$1.so" ] && return
  echo "building DeepSpeed's $3 (once)"
  python -c "from wandistiller.engine.patches import patch_deepspeed; patch_deepspeed(); from deepspeed.ops.op_builder import $2; $2().load()" >".venv/$1.log" 2>&1 || { cat ".venv/$1.log" >&2; exit 1; }
}
build cpu_adam CPUAdamBuilder "CPU Adam, about a minute"
