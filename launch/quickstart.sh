#!/usr/bin/env bash
# From a fresh machine to a picture: distils the embedded teacher and compares the student with it.
# `bash launch/quickstart.sh few_step` makes one that samples in 4, 2 and 1 steps, `... video` one of clips, `... i2v` one
# of clips that begin with a given picture, in 4 and 2 steps, `... lora` adapters with which the whole teacher samples in 4
# and 2, `... any_step` a student that samples in any number of steps, `... style` adapters for a teacher with a style.
# Safe to run again: it goes on where it stopped. To start anew: rm -r runs/quickstart
source "$(dirname "$0")/env.sh"
launch=(deepspeed -q "${here[@]}" --module wandistiller)
recipe=${1:-quickstart} prompts=tiny:held_out more=()
case $recipe in *video) prompts=tiny-video:held_out ;; *i2v) prompts=tiny-i2v:held_out ;; esac
case $recipe in few_step*) more=(--steps 1 2 4) ;; *any_step*) more=(--steps 1 2 4 8 16) ;; lora*) more=(--steps 2 4) ;; i2v) more=(--steps 2 4 --num_prompts 32) ;; esac

if [ "$recipe" = style ]; then # first what a user has: a LoRA of a style, and a few-step LoRA of the plain teacher
  [ -d runs/style_pictures ] || python -m wandistiller.tiny.making.style --write runs/style_pictures
  "${launch[@]}" train --recipe ds_configs/recipes/style_lora.json
  "${launch[@]}" train --recipe ds_configs/recipes/lora.json --max_steps 200 --output_dir runs/style_start
fi
"${launch[@]}" train --recipe "ds_configs/recipes/$recipe.json"
if [ "$recipe" = style ]; then
  draw() { "${launch[@]}" sample --prompts runs/style_pictures/held_out.txt --output "runs/style_drawn/$1" "${@:2}" >/dev/null; }
  draw teacher_in_40_steps --model tiny --steps 40 --guidance_scale 1.5
  draw with_the_style_in_40_steps --lora runs/style_lora --steps 40 --guidance_scale 1.5
  draw both_LoRAs_added_in_4_steps --lora runs/style_start runs/style_lora
  draw LoRA_of_this_run_in_4_steps --lora runs/style
  python -m wandistiller.tiny.making.style --picture runs/style/style.png --style runs/style_drawn/with_the_style_in_40_steps \
    --judge runs/style_drawn/{teacher_in_40,with_the_style_in_40,both_LoRAs_added_in_4,LoRA_of_this_run_in_4}_steps
else
  "${launch[@]}" evaluate --student_path "runs/$recipe" --prompts "$prompts" "${more[@]}"
fi
