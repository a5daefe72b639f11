"""Make, and score, an embedded teacher: a tiny but real Wan2.2-A14B that draws coloured shapes.

    export OMP_WAIT_POLICY=PASSIVE
    python -m wandistiller.tiny.making --output wandistiller/tiny/pipeline
    python -m wandistiller.tiny.making --score wandistiller/tiny/pipeline
    python -m wandistiller.tiny.making --world video --output wandistiller/tiny/video_pipeline
    python -m wandistiller.tiny.making --world video --score wandistiller/tiny/video_pipeline --num 93
    python -m wandistiller.tiny.making --world first_frame --output wandistiller/tiny/image_pipeline
    python -m wandistiller.tiny.making --world first_frame --score wandistiller/tiny/image_pipeline --num 93

With `--output` it makes everything; with `--score` it prints the table of the folder. Every stage has a fixed
seed and writes one part into `--work` (default: OUTPUT.work). A stage whose part exists is skipped, so a
broken run continues where it stopped; delete a part to make it again.

The shipped weights came from these stages one by one, with `--only PART`. For pictures: vae, tokenizer,
text_encoder, base, then both experts at the same time with `--threads 1` each, polished_vae. Their vae and
text_encoder were trained with AdamW's unfused form; all their draws were keyed by SHA-256 where
`keyed_generator` now uses BLAKE2b. So a second run is not bit for bit the same. For clips, each with
`--threads 1`: tokenizer, text_encoder, vae, then polished_vae and base at the same time, then both experts.
"""

import argparse
import logging
import shutil
from pathlib import Path

import torch
from diffusers import (
    AutoencoderKLWan,
    UniPCMultistepScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
)
from transformers import T5TokenizerFast, UMT5EncoderModel

from wandistiller.tiny.making.experts import FLOW_SHIFT, Cache, train_expert
from wandistiller.tiny.making.scores import megabytes, print_scores
from wandistiller.tiny.making.text import train_text_encoder, train_tokenizer
from wandistiller.tiny.making.vae import log, polish_decoder, train_vae
from wandistiller.tiny.making.worlds import WORLDS, World, write_rows
from wandistiller.utils.files import write_json
from wandistiller.wan.components import known_config

FOUNDATIONS = {
    "vae": train_vae,
    "polished_vae": polish_decoder,
    "tokenizer": train_tokenizer,
    "text_encoder": train_text_encoder,
}
PART_NAMES = [*FOUNDATIONS, *(stage.part for stage in WORLDS["image"].stages)]


def make(world: World, work: Path, *, only: str | None = None) -> None:
    """Run every stage whose part is missing in `work`, or only the one named `only`."""
    work.mkdir(parents=True, exist_ok=True)
    for part, train in FOUNDATIONS.items():
        if not (work / part).exists() and only in (None, part):
            train(world, work)
    wanted = [stage for stage in world.stages if only in (None, stage.part)]
    missing = [stage for stage in wanted if not (work / stage.part).exists()]
    cache = Cache.build(world, work) if missing else None
    for stage in missing:
        train_expert(world, work, cache, stage)


def assemble(world: World, work: Path, output: Path) -> None:
    """Write the parts as one pipeline folder in bfloat16; `output` appears, or is replaced, in one rename."""
    bf16 = {"dtype": torch.bfloat16}
    experts = (work / stage.part for stage in world.stages[1:])
    high, low = (WanTransformer3DModel.from_pretrained(expert, **bf16) for expert in experts)
    pipeline = (WanImageToVideoPipeline if world.begins else WanPipeline)(
        tokenizer=T5TokenizerFast.from_pretrained(work / "tokenizer"),
        text_encoder=UMT5EncoderModel.from_pretrained(work / "text_encoder", **bf16),
        vae=AutoencoderKLWan.from_pretrained(work / "polished_vae", **bf16),
        scheduler=UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=FLOW_SHIFT
        ),
        transformer=high.to(torch.bfloat16),
        transformer_2=low.to(torch.bfloat16),
        boundary_ratio=world.boundary,
        expand_timesteps=False,
    )
    temporary, old = (output.with_name(f".{output.name}.{word}") for word in ("new", "old"))
    shutil.rmtree(temporary, ignore_errors=True)
    pipeline.save_pretrained(temporary)
    for file in temporary.glob("*/config.json"):  # without the paths of this machine
        write_json(file, known_config(file))
    if output.exists():
        output.rename(old)
    temporary.rename(output)
    shutil.rmtree(old, ignore_errors=True)
    log.info("wrote %s, %.1f MB", output, megabytes(output))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="wandistiller.tiny.making",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--world", choices=WORLDS, default="image", help="what the teacher draws")
    parser.add_argument("--output", type=Path, help="pipeline folder to make")
    parser.add_argument("--work", type=Path, help="folder of finished stages; <output>.work unless given")
    parser.add_argument("--only", choices=PART_NAMES, help="make this part and stop")
    parser.add_argument("--score", type=Path, metavar="DIR", help="print the measured table of this folder")
    parser.add_argument("--num", type=int, default=200, help="prompts per row of the table")
    parser.add_argument("--steps", type=int, default=40, help="sampler steps")
    parser.add_argument("--guidance", type=float, nargs=2, default=(2.0, 2.0), metavar=("HIGH", "LOW"))
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    log.setLevel(logging.INFO)
    torch.set_num_threads(args.threads)
    world = WORLDS[args.world]
    if args.output is not None:
        work = args.work or args.output.with_name(args.output.name + ".work")
        make(world, work, only=args.only)
        if args.only is None:
            assemble(world, work, args.output)
        if args.only is None and world.begins:
            write_rows()
    if args.score is not None:
        print_scores(world, args.score, number=args.num, steps=args.steps, guidance=tuple(args.guidance))


if __name__ == "__main__":
    main()
