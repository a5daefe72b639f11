#!/usr/bin/env bash
# From a fresh machine to a picture: distils the embedded teacher and compares the student with it.
# Safe to run again: it goes on where it stopped. To start anew: rm -r runs/quickstart
source "$(dirname "$0")/env.sh"
launch=(deepspeed -q --num_gpus "$RANKS" --module wandistiller)

"${launch[@]}" train --recipe ds_configs/recipes/quickstart.json
"${launch[@]}" evaluate --student_path runs/quickstart/student --prompts tiny:held_out
