"""Which scheduler leads a student nearest to where its velocity leads, for a number of steps.

    python tests/bench/samplers.py runs/quickstart/student
    python tests/bench/samplers.py runs/few_step/student --steps 4

Prints for each scheduler the distance of its latents from Euler's method in 1000 steps, and from Euler's
method in as many steps, which students of few steps are trained for, as shares of their norm: 16 prompts.
"""

import torch
from common import head, parser, row
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler, WanPipeline
from torch import Tensor

from wandistiller.batch import Conditioning
from wandistiller.evaluation.draw_samples import STEPS
from wandistiller.experts import Expert
from wandistiller.flow import FewSteps, FlowSchedule
from wandistiller.network.network import Network
from wandistiller.teacher.base import LocalTeacher
from wandistiller.tiny.shapes import HELD_OUT
from wandistiller.utils.keyed_random import keyed_normal
from wandistiller.wan.pipeline import open_wan
from wandistiller.wan.sampling import denoise, few_step_config

FINE = 1000
"""Steps of the reference."""


def main() -> None:
    made = parser(__doc__)
    made.add_argument("student")
    made.add_argument("--steps", type=int, nargs="+", default=[4, 8, 20, STEPS])
    made.add_argument("--shift", type=float, default=3.0)
    args = made.parse_args()
    pipe = WanPipeline.from_pretrained(args.student, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    prompts = HELD_OUT[:16]
    text_BLD, _ = pipe.encode_prompt(prompts, do_classifier_free_guidance=False, max_sequence_length=512)
    folder, network = open_wan(args.student), LocalTeacher({Expert.HIGH_NOISE: Network(pipe.transformer)})
    noise = keyed_normal((len(prompts), *folder.latent_shape(64, 64, 1)), "bench")

    def euler(steps: int) -> Tensor:
        levels = FlowSchedule(args.shift, None, 0).steps(steps)
        return denoise(
            network.velocity, folder, args.shift, noise, Conditioning(text_BLD), 0, FewSteps(tuple(levels))
        )[0]

    def stock(scheduler: object, steps: int) -> Tensor:
        pipe.scheduler = scheduler
        size = {"height": 64, "width": 64, "num_frames": 1, "guidance_scale": 1.0, "output_type": "latent"}
        return pipe(prompt_embeds=text_BLD, latents=noise, num_inference_steps=steps, **size).frames

    fine = euler(FINE)
    head("steps", "scheduler", f"off {FINE} steps", "off Euler in as many")
    for steps in args.steps:
        exact, shift = euler(steps), {"flow_shift": args.shift, "use_flow_sigmas": True}
        stretched = {k: v for k, v in few_step_config(args.shift, steps).items() if k != "_class_name"}
        schedulers = {
            "UniPC": UniPCMultistepScheduler(prediction_type="flow_prediction", **shift),
            "FlowMatchEuler, stretched": FlowMatchEulerDiscreteScheduler(**stretched),
            "FlowMatchEuler, shift alone": FlowMatchEulerDiscreteScheduler(shift=args.shift),
        }
        for name, scheduler in schedulers.items():
            x0 = stock(scheduler, steps)
            off = (100 * torch.dist(x0, other) / other.norm() for other in (fine, exact))
            row(steps, name, *(f"{share:.2f} %" for share in off))


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
