"""Print the velocity error of the embedded teacher in 8 and 4 bits, by band of sigma, and its bytes.

python tests/bench/quantized.py
"""

import tempfile
from pathlib import Path
from unittest import mock

import torch

from wandistiller.batch import Expert
from wandistiller.data.text_cache import TextCache
from wandistiller.distributed import collectives
from wandistiller.evaluation import quantization_error
from wandistiller.flow import keyed_normal
from wandistiller.planner.teacher_memory import teacher_bytes
from wandistiller.teacher.base import Guidance
from wandistiller.teacher.build import build_teacher
from wandistiller.teacher.teacher_json import teacher_engine
from wandistiller.tiny import shapes
from wandistiller.wan.pipeline import open_wan
from wandistiller.wan.sampling import denoise

IMAGES, STEPS = 16, 10


def main() -> None:
    collectives.init("warning")
    folder, prompts = open_wan("tiny"), list(shapes.SPECS)[:1100:69][:IMAGES]
    text = TextCache(Path(tempfile.mkdtemp()), folder.path, collectives.device())
    text.fill([*prompts, ""])
    guidance = Guidance(text[""], dict.fromkeys(Expert, 1.5))
    shape, x0_BCFHW = folder.latent_shape(shapes.IMAGE_SIZE, shapes.IMAGE_SIZE, 1), None
    for is_bf16 in (False, True):
        for weights in ("int8", "float8", "nf4"):
            given = {"bf16": {"enabled": is_bf16}, "wandistiller": {"weights": weights}}
            ds = teacher_engine("", given, 1)
            teacher = build_teacher(folder, ds, guidance)
            if x0_BCFHW is None:
                noise_BCFHW = torch.stack([keyed_normal(shape, 0, "f", i) for i in range(IMAGES)])
                given = folder, folder.shift, noise_BCFHW, text.of(prompts), STEPS
                x0_BCFHW, _ = denoise(teacher.velocity, *given)
            with mock.patch.object(quantization_error, "SAMPLES", IMAGES):
                errors = quantization_error.quantization_error(
                    folder, ds, teacher, guidance, x0_BCFHW, text.of(prompts), 0
                )
            words, n = quantization_error.in_words(errors), teacher_bytes(folder, ds, 1).device
            print(f"{weights:7} {'bf16' if is_bf16 else 'float32':8} {n:9,} bytes; {words}", flush=True)


if __name__ == "__main__":
    main()
