"""What the texts do with a finished run: each command and Python block, in the order of its page."""

import re
import runpy
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from image_data import image_data
from markdown_pages import AFTER_A_RUN, PAGES, Command, blocks, commands, text
from ranks import wandistiller
from recipes import PROMPTS, train
from slow_cases import slow_but
from small_wan import IMAGE_FORMS, make_wan

SHORT = {  # flags that make a command on the embedded teacher take seconds
    "train": "--rollout_steps 2 --max_steps 2 --sample_steps 2 --data_path three.txt",
    "sample": "--steps 2",
    "evaluate": "--steps 2 --num_prompts 2",
}
AFTERWARDS = [
    p for p in PAGES if blocks("python", p) or {*AFTER_A_RUN} & {c.ours[0] for c in commands(p) if c.ours}
]


@pytest.fixture(scope="module")
def quick_start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the quick start has run, two steps of it, as each run that the pages name."""
    made = tmp_path_factory.mktemp("finished")
    (made / "three.txt").write_text("\n".join([*PROMPTS.splitlines()[:2], "x"]))
    flags = "--recipe ds_configs/recipes/quickstart.json " + SHORT["train"]
    wandistiller("train", *flags.split(), cwd=made)
    for name in ("quarter", "two_steps", "few_step", "video", "few_step_video"):
        (made / "runs" / name).symlink_to(made / "runs" / "quickstart")
    for recipe in ("lora.json", "any_step.json"):
        wandistiller("train", *flags.replace("quickstart.json", recipe).split(), cwd=made)
    (made / "runs" / "lora_video").symlink_to(made / "runs" / "lora")
    of_first_frames = flags.replace("quickstart.json", "lora_i2v.json").replace("--data_path three.txt", "")
    wandistiller("train", *of_first_frames.split(), cwd=made)
    data, wan = image_data(made), make_wan(made / "i2v", **IMAGE_FORMS["Wan2.2-I2V-A14B"])
    (made / "0.png").rename(made / "portrait.png")
    data.write_text(data.read_text().replace('"0.png"', '"portrait.png"'))
    clips = {"num_frames": 17, "max_steps": 2, "data_path": str(data), "sample_prompts": ["left"]}
    train(made, wan, "runs/i2v", ranks=1, **clips)
    (made / "runs" / "i2v" / "1_match").symlink_to(made / "runs" / "i2v")
    return made


def steps_after_a_run(page: str) -> Iterator[Command | str]:
    """The page's commands that need a finished run, and its Python blocks, in the order of the page."""
    exported = {word for c in commands(page) if c.ours[:1] == ("export",) for word in c.words}
    for block in re.finditer(r"```(bash|python)\n(.*?)```", text(page), re.DOTALL):
        if block[1] == "python":
            yield block[2]
            continue
        for command in [c for c in commands(page) if c.line in block[2].replace("\\\n", " ").splitlines()]:
            trains = command.ours[:1] == ("train",) and command.value("--output_dir") in exported
            if trains or command.ours[:1] and command.ours[0] in AFTER_A_RUN or command.words[0] == "echo":
                yield command


@pytest.mark.slow
@pytest.mark.parametrize("page", slow_but(["README.md"], AFTERWARDS))
def test_what_a_page_does_with_a_finished_run_works(
    page: str, quick_start: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(quick_start)
    for step in steps_after_a_run(page):
        if isinstance(step, str):
            (quick_start / "block.py").write_text(step)
            runpy.run_path(str(quick_start / "block.py"))
        elif step.ours:
            wandistiller(*step.ours, *shlex.split(SHORT.get(step.ours[0], "")), cwd=quick_start)
        else:
            subprocess.run(["bash", "-c", step.line], check=True, cwd=quick_start)
