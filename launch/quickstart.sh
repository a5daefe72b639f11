#!/usr/bin/env bash
# From a fresh machine to a picture: distils the embedded teacher and compares the student with it.
# `bash launch/quickstart.sh few_step` makes one that samples in 4, 2 and 1 steps, `... video` one of clips, `... i2v` one
# of clips that begin with a given picture, in 4 and 2 steps, `... lora` adapters with which the whole teacher samples in 4 and 2.
# Safe to run again: it goes on where it stopped. To start anew: rm -r runs/quickstart
source "$(dirname "$0")/env.sh"
launch=(deepspeed -q "${here[@]}" --module wandistiller)
recipe=${1:-quickstart} prompts=tiny:held_out more=()
case $recipe in *video) prompts=tiny-video:held_out ;; *i2v) prompts=tiny-i2v:held_out ;; esac
case $recipe in few_step*) more=(--steps 1 2 4) ;; lora*) more=(--steps 2 4) ;; i2v) more=(--steps 2 4 --num_prompts 32) ;; esac

"${launch[@]}" train --recipe "ds_configs/recipes/$recipe.json"
"${launch[@]}" evaluate --student_path "runs/$recipe" --prompts "$prompts" "${more[@]}"
