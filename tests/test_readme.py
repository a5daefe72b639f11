"""Every command of the README runs: on the embedded teacher for real where it is cheap, else as a dry run."""

import json
import re
import shlex
from pathlib import Path

import pytest
from ranks import ROOT, has_async_io, wandistiller

from wandistiller.__main__ import main
from wandistiller.config import STRATEGIES, shipped

WAN21 = {"num_attention_heads": 12, "attention_head_dim": 128, "ffn_dim": 8960, "num_layers": 30}  # 1.3B
WAN14 = {"num_attention_heads": 40, "attention_head_dim": 128, "ffn_dim": 13824, "num_layers": 40}
WAN5 = {"num_attention_heads": 24, "attention_head_dim": 128, "ffn_dim": 14336, "num_layers": 30, "in_channels": 48,
        "out_channels": 48}  # fmt: skip
HUB = {  # architecture, spatial compression, experts
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": (WAN21, 8, 1),
    "Wan-AI/Wan2.1-T2V-14B-Diffusers": (WAN14, 8, 1),
    "Wan-AI/Wan2.2-TI2V-5B-Diffusers": (WAN5, 16, 1),
    "Wan-AI/Wan2.2-T2V-A14B-Diffusers": (WAN14, 8, 2),
}


def blocks(language: str, readme: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / readme).read_text(), re.DOTALL)


def commands(readme: str = "README.md") -> list[list[str]]:
    lines = "".join(blocks("bash", readme)).replace("\\\n", " ").splitlines()
    return [shlex.split(line) for line in lines if line.strip()]


OURS = [c for c in commands() if "wandistiller" in c]
OF_MACHINES = [c for c in commands("ds_configs/README.md") if any("machines" in word for word in c)]
PLACEMENTS = [c for c in commands("ds_configs/README.md") if c not in OF_MACHINES]
RECIPES = [c for c in commands("ds_configs/recipes/README.md") if "train" in c]
RUNS = [c for c in OURS if {"train", "prepare"} & set(c)] + PLACEMENTS + OF_MACHINES + RECIPES


def arguments(command: list[str]) -> list[str]:
    return command[command.index("wandistiller") + 1 :]


def lay_out(folder: Path) -> None:
    """The JSON files of the real pipelines, under their hub names, without weights; and a file of prompts."""
    for name, (sizes, spatial, experts) in HUB.items():
        config = {"patch_size": [1, 2, 2], "in_channels": 16, "out_channels": 16, "text_dim": 4096, "freq_dim": 256,
                  "rope_max_seq_len": 1024, "cross_attn_norm": True, "_class_name": "WanTransformer3DModel",
                  **sizes}  # fmt: skip
        channels = sizes.get("in_channels", 16)
        parts = {"vae/config.json": {"scale_factor_spatial": spatial, "scale_factor_temporal": 4, "z_dim": channels,
                                     "latents_mean": [0.0] * channels, "latents_std": [1.0] * channels},
                 "scheduler/scheduler_config.json": {"_class_name": "UniPCMultistepScheduler", "flow_shift": 3.0},
                 "model_index.json": {"_class_name": "WanPipeline", "boundary_ratio": 0.875 if experts == 2 else None},
                 "transformer/config.json": config} | ({"transformer_2/config.json": config} if experts == 2 else {})  # fmt: skip
        for file, content in parts.items():
            (folder / name / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / name / file).write_text(json.dumps(content))
    (folder / "prompts.txt").write_text("\n".join(f"a cat, number {i}" for i in range(8)))


def test_readme_has_commands_for_every_wan() -> None:
    named = {word for c in OURS for word in c}
    assert set(HUB) <= named


@pytest.mark.parametrize("command", RUNS, ids=lambda c: " ".join(c)[-60:])
def test_training_command_of_the_readme_passes_its_dry_run(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "disk" in command and not has_async_io():
        pytest.skip("no libaio here")
    lay_out(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main([*(a for a in arguments(command) if a != "--dry_run"), "--dry_run"]) == 0


@pytest.mark.parametrize("command", [c for c in OURS if "plan" in c], ids=lambda c: " ".join(c)[-60:])
def test_plan_of_the_readme_recommends_what_the_next_dry_run_takes(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lay_out(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(arguments(command)) == 0
    assert main(["train", "--recipe", command[-1], "--output_dir", "out", "--dry_run"]) == 0


BY_HAND = [c for c in OURS if c[0] == "wandistiller" and not {"--dry_run", "plan"} & set(c)]
SHORT = {  # flags that make the commands of the path by hand take seconds
    "prepare": "--data_path three.txt --rollout_steps 2 --max_steps 2 --sample_steps 2",
    "train": "--data_path three.txt --rollout_steps 2 --max_steps 2 --sample_steps 2",
    "export": "",
    "sample": "--steps 2",
    "evaluate": "--steps 2 --num_prompts 2",
}


def test_path_by_hand_runs_on_the_embedded_teacher(tmp_path: Path) -> None:
    (tmp_path / "three.txt").write_text("a red circle on a blue background, left\na green square on a red background, top\nx\n")
    assert list(dict.fromkeys(c[1] for c in BY_HAND)) == list(SHORT)
    for command in BY_HAND:
        wandistiller(*command[1:], *shlex.split(SHORT[command[1]]), cwd=tmp_path)
    assert (tmp_path / "pictures" / "grid.png").is_file()
    assert json.loads((tmp_path / "runs" / "quickstart" / "evaluation.json").read_text())["teacher"]["parameters"] > 0


def test_the_table_of_placements_has_a_command_for_every_teacher_json() -> None:
    jsons = {STRATEGIES.get(c[-1]) or Path(c[-1]).stem for c in PLACEMENTS}
    assert jsons == {file.stem for file in (ROOT / "ds_configs" / "teacher").glob("*.json")}


def test_every_shipped_recipe_has_a_command_and_a_result() -> None:
    jsons = {Path(word).name for c in RECIPES for word in c if word.endswith(".json")}
    assert jsons == {file.name for file in (ROOT / "ds_configs" / "recipes").glob("*.json")}


def test_scripts_of_the_readme_exist() -> None:
    scripts = re.findall(r"bash (launch/\w+\.sh)", (ROOT / "README.md").read_text())
    assert scripts and all((ROOT / s).is_file() for s in scripts)


def test_the_table_of_launchers_has_every_script() -> None:
    named = set(re.findall(r"\]\((\w+\.\w+)\)", (ROOT / "launch" / "README.md").read_text()))
    there = {file.name for file in (ROOT / "launch").iterdir() if file.suffix in (".sh", ".sbatch", ".example")}
    assert there - {"env.sh"} == named


@pytest.mark.parametrize("readme", ["README.md", "ds_configs/README.md", "ds_configs/recipes/README.md"])
def test_every_json_that_a_readme_names_is_shipped(readme: str) -> None:
    folders = "student|teacher|students|recipes|machines"
    named = re.findall(rf"(?:ds_configs/)?((?:{folders})/[\w.]+\.json)", (ROOT / readme).read_text())
    assert named and all(shipped(f"ds_configs/{name}").is_file() for name in named)
