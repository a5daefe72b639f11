"""The settings of ComfyUI's nodes, for a model card."""

from wandistiller.checkpoint.facts import Facts
from wandistiller.experts import Expert, expert_at
from wandistiller.export.source import written
from wandistiller.flow import RENOISE, FlowSchedule
from wandistiller.wan.given_frames import given_places

COMFY = """
In ComfyUI, `{latent}` has width {width}, height {height}, length {num_frames}. ComfyUI knows neither the
shift nor the guidance of this student:

| node | set |
|---|---|
"""
ONE_SAMPLER = """\
| ModelSamplingSD3, after {loader} | shift {shift} |
| KSampler | steps {steps}{fewer}, cfg 1, sampler {sampler}, scheduler simple |
"""
TWO_SAMPLERS = """\
| two ModelSamplingSD3, one after each {loader} | shift {shift} |
| both KSamplerAdvanced | steps {steps}, cfg 1, sampler {sampler}, scheduler simple |
| the first, with the high-noise model | add_noise enable, start_at_step 0, end_at_step {split}, \
return_with_leftover_noise enable |
| the second, with the low-noise model | add_noise disable, start_at_step {split}, end_at_step 10000, \
return_with_leftover_noise disable |

Step {split} of {steps} is the first whose noise level is below the boundary {boundary}{others}.
"""
OTHERS = "; of other numbers of steps it is {}"


def comfy_nodes(facts: Facts, loader: str) -> str:
    """The settings of ComfyUI's nodes, in a table.

    Args:
        loader: the node whose model is shifted.
    """
    latent = "EmptyHunyuanLatentVideo" if facts.config.out_channels == 16 else "Wan22ImageToVideoLatent"
    if facts.image_to_video:
        latent = "WanImageToVideo" if facts.config.joined_channels else latent
        latent = "WanFirstLastFrameToVideo" if len(given_places(facts.config)) == 2 else latent
    text = COMFY + (TWO_SAMPLERS if facts.has_boundary else ONE_SAMPLER)
    more = {"latent": latent, "loader": loader, "sampler": "euler or uni_pc", "others": "", "fewer": ""}
    if facts.few_steps:
        renoise = facts.sampler == RENOISE
        more["sampler"] = "lcm" if renoise else "euler"
        more["fewer"] = " or fewer" * (renoise and facts.steps > 1)  # it shifts any number by itself
    elif facts.has_boundary:
        splits = {n: split_step(facts, n) for n in (4, 8, 20, 40) if n != facts.steps}
        more["others"] = OTHERS.format(", ".join(f"{split} of {steps}" for steps, split in splits.items()))
    return text.format(**written(facts) | more, split=split_step(facts, facts.steps))


def split_step(facts: Facts, steps: int) -> int:
    """The steps of the high-noise expert, by ComfyUI's scheduler `simple` as by diffusers."""
    path = FlowSchedule(facts.shift, facts.boundary, seed=0)
    sigmas = [round(path.shifted(1 - step / steps), 6) for step in range(steps)]
    return sum(expert_at(sigma, path.boundary) is Expert.HIGH_NOISE for sigma in sigmas)
