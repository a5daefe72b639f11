"""`pip install .` carries the embedded teachers and the shipped DeepSpeed JSONs along."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
CODE = find_packages(include=["wandistiller", "wandistiller.*"], exclude=["wandistiller.tiny.making"])
TEACHERS = ("pipeline", "video_pipeline", "image_pipeline", "first_frames")

setup(
    name="wandistiller",
    version=re.search(r'__version__ = "(.+)"', (HERE / "wandistiller" / "__init__.py").read_text())[1],
    description="Distil a large Wan video transformer into a small, fast student under DeepSpeed",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11,<3.14",  # for which diffusers and torch have releases
    packages=[*CODE, "wandistiller.ds_configs"],
    package_dir={"wandistiller": "wandistiller", "wandistiller.ds_configs": "ds_configs"},
    package_data={
        "wandistiller": [
            "py.typed",
            "*/*.css",
            "*/*.jinja",
            *(f"tiny/{name}/{files}" for name in TEACHERS for files in ("*", "*/*")),
        ],
        "wandistiller.ds_configs": ["*.md", "*/*.json", "*/*.md"],
    },
    install_requires=[
        "torch>=2.13",
        "deepspeed>=0.19.8,<0.20",  # workarounds in the code name this version
        "diffusers>=0.42.1,<0.43",
        "transformers>=5.23",
        "safetensors>=0.8",
        "huggingface_hub",
        "pydantic>=2.10",
        "pydantic-core",
        "annotated-types",
        "greenlet",  # forward passes that go through a network's blocks together
        "ftfy",  # WanPipeline cleans prompts with it
        "jinja2",
        "numpy",
        "pillow",
        "protobuf",  # the tokenizer in ComfyUI's text encoder
        "pyyaml",
        "psutil",
        "py-cpuinfo",
        "tqdm",
    ],
    extras_require={
        "hub": ["datasets>=4"],  # prompts of data sets; earlier ones run code of a data set
        "video": ["av>=18"],  # releases with FFmpeg 8, whose filter scale knows HDR
        "lora": ["peft>=0.21"],
        "report": ["matplotlib"],
        "quantized": ["torchao==0.18.*"],  # a teacher's weights in 8 or 4 bits
        "offload": ["accelerate"],  # device maps; a text encoder that is larger than the memory for it
        "test": [
            "pytest",
            "hypothesis",
            "pytest-xdist",
            "ruff",
            "peft>=0.21",
            "av>=18",
            "imageio",  # for diffusers' own writer of videos, which cards name
            "imageio-ffmpeg",  # a whole ffmpeg, which judges how videos are read
            "tensorboard",
            "wandb",
            "matplotlib",
            "datasets>=4",
        ],
    },
    entry_points={"console_scripts": ["wandistiller=wandistiller.cli.main:command"]},
)
