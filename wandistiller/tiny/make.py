"""Make, and score, the embedded teacher: a tiny but real Wan2.2-A14B that draws coloured shapes.

    OMP_WAIT_POLICY=PASSIVE python -m wandistiller.tiny.make --output wandistiller/tiny/pipeline
    python -m wandistiller.tiny.make --score wandistiller/tiny/pipeline

The first line makes everything; the second prints the table of the folder. Every stage has a fixed seed and
writes one part into `--work` (default: OUTPUT.work). A stage whose part exists is skipped, so a broken run
continues where it stopped; delete a part to make it again. The shipped weights came from these stages one by
one, with `--only PART`: vae, tokenizer, text_encoder, base, then both experts at the same time with
`--threads 1` each, polished_vae, and at last the line above. vae and text_encoder were trained with AdamW's
unfused form; all their draws were keyed by SHA-256 where `keyed_generator` now uses BLAKE2b. So a second run
is not bit for bit the same.
"""

import argparse
import hashlib
import logging
import shutil
from pathlib import Path

import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel
from torch import Tensor
from transformers import T5TokenizerFast, UMT5EncoderModel

from wandistiller.tiny import shapes
from wandistiller.tiny.make_experts import BOUNDARY, FLOW_SHIFT, STAGES, Cache, train_expert
from wandistiller.tiny.make_text import train_text_encoder, train_tokenizer
from wandistiller.tiny.make_vae import log, polish_decoder, train_vae, vae_psnr
from wandistiller.utils.files import write_json
from wandistiller.wan.known import known_config

FOUNDATIONS = {
    "vae": train_vae,
    "polished_vae": polish_decoder,
    "tokenizer": train_tokenizer,
    "text_encoder": train_text_encoder,
}
EXPERTS = {stage.part: stage for stage in STAGES}
SCORED_BATCH = 56
"""Prompts per call of the pipeline in scoring."""


def make(work: Path, *, only: str | None = None) -> None:
    """Run every stage whose part is missing in `work`, or only the one named `only`."""
    work.mkdir(parents=True, exist_ok=True)
    for part, train in FOUNDATIONS.items():
        if not (work / part).exists() and only in (None, part):
            train(work)
    missing = [part for part in EXPERTS if not (work / part).exists() and only in (None, part)]
    cache = Cache.build(work) if missing else None
    for part in missing:
        train_expert(work, cache, EXPERTS[part])


def assemble(work: Path, output: Path) -> None:
    """Write the parts as one pipeline folder in bfloat16; `output` appears, or is replaced, in one rename."""
    bf16 = {"dtype": torch.bfloat16}
    high, low = (WanTransformer3DModel.from_pretrained(work / stage.part, **bf16) for stage in STAGES[1:])
    pipeline = WanPipeline(
        tokenizer=T5TokenizerFast.from_pretrained(work / "tokenizer"),
        text_encoder=UMT5EncoderModel.from_pretrained(work / "text_encoder", **bf16),
        vae=AutoencoderKLWan.from_pretrained(work / "polished_vae", **bf16),
        scheduler=UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=FLOW_SHIFT
        ),
        transformer=high.to(torch.bfloat16),
        transformer_2=low.to(torch.bfloat16),
        boundary_ratio=BOUNDARY,
        expand_timesteps=False,
    )
    fresh, old = (output.with_name(f".{output.name}.{word}") for word in ("new", "old"))
    shutil.rmtree(fresh, ignore_errors=True)
    pipeline.save_pretrained(fresh)
    for file in fresh.glob("*/config.json"):  # without the paths of this machine
        write_json(file, known_config(file))
    if output.exists():
        output.rename(old)
    fresh.rename(output)
    shutil.rmtree(old, ignore_errors=True)
    log.info("wrote %s, %.1f MB", output, megabytes(output))


def megabytes(folder: Path) -> float:
    """Return the size of all files below a folder, in 10^6 bytes."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6


def open_pipeline(folder: Path) -> WanPipeline:
    """Open the pipeline in `folder` without progress bars, its bfloat16 weights in float32."""
    pipeline = WanPipeline.from_pretrained(folder, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def sample(
    pipeline: WanPipeline,
    prompts: list[str],
    *,
    steps: int,
    guidance: tuple[float, float],
    negative_prompt: str = "",
) -> Tensor:
    """Draw one 64x64 picture per prompt with the stock pipeline, picture i from the noise of generator i.

    Args:
        guidance: guidance scale of the high- and the low-noise expert; (1, 1) is unguided.
        negative_prompt: text of the unconditional branch.

    Returns:
        image_BCHW in [0, 1].
    """
    generators = [torch.Generator().manual_seed(i) for i in range(len(prompts))]
    image_BCHW = []
    for start in range(0, len(prompts), SCORED_BATCH):
        part = slice(start, start + SCORED_BATCH)
        video_BFCHW = pipeline(
            prompts[part],
            negative_prompt=negative_prompt,
            num_inference_steps=steps,
            generator=generators[part],
            height=shapes.IMAGE_SIZE,
            width=shapes.IMAGE_SIZE,
            num_frames=1,
            output_type="pt",
            guidance_scale=guidance[0],
            guidance_scale_2=guidance[1],
        ).frames
        image_BCHW.append(video_BFCHW[:, 0])
    return torch.cat(image_BCHW)


def chosen(prompts: list[str], number: int) -> list[str]:
    """Return `number` prompts in an order fixed by their hashes, repeated if there are fewer."""
    by_hash = sorted(prompts, key=lambda prompt: hashlib.sha256(f"scored {prompt}".encode()).digest())
    return [by_hash[i % len(by_hash)] for i in range(number)]


def print_scores(folder: Path, *, number: int, steps: int, guidance: tuple[float, float]) -> None:
    """Print the measured table of a pipeline folder."""
    pipeline = open_pipeline(folder)
    psnr = vae_psnr(pipeline.vae, shapes.held_out_prompts(), seed=10_000)
    sizes = ", ".join(
        f"{path.name} {megabytes(path):.2f}" for path in sorted(folder.iterdir()) if path.is_dir()
    )
    print(f"{folder}: {megabytes(folder):.2f} MB ({sizes}); VAE {psnr:.1f} dB on held-out pictures")
    print(f"{steps} steps, {number} prompts per row")
    print("| prompts | guidance | fully right | MSE to the prompt's picture |\n|---|---|---|---|")
    for name, prompts in (("seen", shapes.seen_prompts()), ("held out", shapes.held_out_prompts())):
        scored = chosen(prompts, number)
        for scales in (guidance, (1.0, 1.0)):
            image_BCHW = sample(pipeline, scored, steps=steps, guidance=scales)
            right = 100 * sum(shapes.fully_right(image_BCHW, scored)) / number
            mse = shapes.mse_to_prompts(image_BCHW, scored).mean().item()
            print(f"| {name} | {scales[0]:g}, {scales[1]:g} | {right:.1f} % | {mse:.5f} |", flush=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="pipeline folder to make")
    parser.add_argument("--work", type=Path, help="folder of finished stages; <output>.work unless given")
    parser.add_argument("--only", choices=[*FOUNDATIONS, *EXPERTS], help="make this part and stop")
    parser.add_argument("--score", type=Path, metavar="DIR", help="print the measured table of this folder")
    parser.add_argument("--num", type=int, default=200, help="prompts per row of the table")
    parser.add_argument("--steps", type=int, default=40, help="sampler steps")
    parser.add_argument("--guidance", type=float, nargs=2, default=(2.0, 2.0), metavar=("HIGH", "LOW"))
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    log.setLevel(logging.INFO)
    torch.set_num_threads(args.threads)
    if args.output is not None:
        work = args.work or args.output.with_name(args.output.name + ".work")
        make(work, only=args.only)
        if args.only is None:
            assemble(work, args.output)
    if args.score is not None:
        print_scores(args.score, number=args.num, steps=args.steps, guidance=tuple(args.guidance))


if __name__ == "__main__":
    main()
