#!/usr/bin/env bash
# What only a GPU shows, unattended: a line for each step with its figure, at most ten minutes each.
#   bash tests/gpu/first_hour.sh             all steps; run again, it goes on after the last that passed
#   bash tests/gpu/first_hour.sh numbers     some steps, whether or not they passed before
#   PARALLEL=3        as many steps beside each other, where time is short; their seconds are then upper bounds
#   WHEELS=FOLDER     packages that PYTHON (python3) lacks, as wheels, for a machine without network
#   ROWS="images simpletuner"   these of `loras` alone
#   REHEARSAL=1       on a CPU in tiny sizes, to see that the steps run
#   REHEARSAL=simulated   the same on a simulated GPU; what its checks find is in FOLDER/simulated
# Logs are in FOLDER, by default runs/first_hour.
set -uo pipefail
cd "$(dirname "$0")/../.."
folder=${FOLDER:-runs/first_hour} python=${PYTHON:-python3} workers=${WORKERS:-2}
mkdir -p "$folder"
if [ -n "${WHEELS-}" ]; then "$python" -m pip install -q --no-index --no-deps "$WHEELS"/*.whl || exit; fi
export HF_HUB_OFFLINE=1 REHEARSAL=${REHEARSAL-} PYTHONPATH=$PWD PYTHONUNBUFFERED=1
if [ "$REHEARSAL" ]; then
  export DS_ACCELERATOR=cpu
  if [ "$REHEARSAL" = simulated ]; then
    simulated=$("$python" tests/helpers/simulated.py "$folder/simulated" 1 8192) || exit
    eval "$simulated"
  fi
  layers=10 small=--small batches="1x1 1x2" few="--max_steps 3 --placements replicated streamed"
else
  export PYTORCH_ALLOC_CONF=expandable_segments:True DS_ACCELERATOR=cuda
  layers=40 small="" few="" batches="1x1 4x1 16x1 1x16"
fi
tests() { "$python" -m pytest -q -p no:cacheprovider -m gpu "$@"; }
streamed() { "$python" tests/gpu/stream_14b.py --folder "$folder/stream" $small --layers "$@"; }
measured() { "$python" tests/gpu/measure.py "$@" $small; }

doctor() { "$python" -m wandistiller doctor; }
numbers() { tests -n $workers -rP tests/gpu/test_numbers.py -k in_float32; }
stream() { streamed $((layers > 4 ? 4 : 1)) --batches $batches; }
overlap() { measured overlap; }
rows=${ROWS:-images images_compiled images_adam_compiled images_int8 images_80_adam_compiled clips_17 clips_17_compiled simpletuner}
loras() { # in the first minute each row makes a step on one layer of the teacher, beside the others
  of_one_layer() { "$python" tests/gpu/train_14b.py --folder "$folder/stream" $small --layers 1 --steps 1 --rows "$@"; }
  of_one_layer && for row in $rows; do of_one_layer "$row" 2>&1 | grep "^=>\|Error" | sed "s/^=>/starts:/" & done && wait
  trained $rows
}
stream_whole() { streamed "$layers" --settings streamed ZeRO-Inference --batches $batches; }
trained() { "$python" tests/gpu/train_14b.py --folder "$folder/stream" $small --layers "$layers" --rows "$@"; }
students() { trained 16x1 1x16; }
kernels() { measured kernels; }
coders() { measured coders; }
layouts() { tests tests/gpu/test_numbers.py -k "bf16 or deterministic"; }
memory() { tests tests/gpu/test_memory.py; }
placements() { "$python" tests/bench/placements.py --ranks 1 $few; }
recipe() { "$python" -m wandistiller train --recipe "ds_configs/recipes/$1.json" --output_dir "$folder/$1"; }
quickstart() { recipe quickstart; }
few_step() { recipe few_step; }

ALL=(doctor numbers stream_whole loras overlap kernels coders memory layouts quickstart few_step stream students placements)
figure() { # of a log: the lines that begin with =>, or the last one
  grep '^=>' "$1" | cut -c4- | paste -sd ';' | grep . || tail -n 1 "$1" | cut -c1-160
}
run_step() {
  log=$folder/$1.log start=$SECONDS
  (
    export -f $(compgen -A function)
    export folder python workers layers small few batches rows
    exec timeout -k 10 600 bash -uc "$1"
  ) >"$log" 2>&1 &
  step=$!
  trap 'kill $step 2>/dev/null' TERM
  wait $step
  code=$?
  if [ $code -eq 0 ]; then touch "$folder/$1.passed"; state=pass; else state="FAIL $code"; fi
  printf '%-8s %-12s %4d s   %s\n' "$state" "$1" $((SECONDS - start)) "$(figure "$log")"
  return $code
}
started=() failed=0
trap 'kill $(jobs -rp); wait; exit 143' TERM INT # no step goes on and takes memory of the next ones
for step in "${@:-${ALL[@]}}"; do
  if [ $# -eq 0 ] && [ -e "$folder/$step.passed" ]; then continue; fi
  while (($(jobs -rp | wc -l) >= ${PARALLEL:-1})); do wait -n; done
  run_step "$step" &
  started+=($!)
done
for job in "${started[@]}"; do wait "$job" || failed=1; done
exit $failed
