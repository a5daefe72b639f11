"""Wrong input: exit code 2, one message on stderr, no traceback, nothing written."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from wandistiller import placement
from wandistiller.__main__ import main

ROOT = Path(__file__).parent.parent
DEEPSPEED = {"train_batch_size": 4, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}
HALF = {"num_layers": 2}


Errors = Callable[..., list[str]]


class Run:
    """A sound recipe for the small two-expert teacher, and its files; a test spoils one thing."""

    def __init__(self, folder: Path, teacher: Path):
        self.folder, self.output = folder, folder / "out"
        self.recipe: dict[str, Any] = {
            "teacher_path": str(teacher), "data_path": self.file("prompts.txt", "a red circle\n"),
            "output_dir": str(self.output), "student_config": self.file("student.json", HALF),
            "deepspeed_config": self.file("ds.json", DEEPSPEED), "height": 64, "width": 64, "max_steps": 2,
            "teacher_deepspeed_config": self.file("teacher.json", {"zero_optimization": {"stage": 0}}),
        }  # fmt: skip

    def file(self, name: str, content: Any) -> str:
        (self.folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
        return str(self.folder / name)

    def command(self, *flags: str, command: str = "train") -> list[str]:
        return [command, "--recipe", self.file("recipe.json", self.recipe), *flags]


@pytest.fixture
def run(tmp_path: Path, wan2: Path) -> Run:
    return Run(tmp_path, wan2)


@pytest.fixture
def errors(run: Run, one_rank: object, quiet_logging: None, capsys: pytest.CaptureFixture) -> Errors:
    """A function that runs a command in this process; checks the exit code and gives what it wrote on stderr."""

    def fails(*flags: str, command: str = "train") -> list[str]:
        assert main(run.command(*flags, command=command)) == 2
        captured = capsys.readouterr()
        assert captured.out == "" and not run.output.exists()
        return [line for line in captured.err.splitlines() if line.startswith("error: ")]

    return fails


def test_the_sound_recipe_has_no_error(run: Run) -> None:
    from wandistiller.check import read_job
    from wandistiller.shorthands import read_run

    job = read_job(read_run(run.command()[2], {}), 2)
    assert (job.batch.micro, job.batch.total, job.run.max_steps) == (2, 4, 2)


@pytest.mark.parametrize("command", ["train", "prepare"])
def test_a_missing_prompt_file(run: Run, errors: Errors, command: str) -> None:
    (error,) = errors("--data_path", f"{run.folder}/none.txt", command=command)
    assert error.startswith(f"error: {run.folder}/none.txt: no such file or folder.")


def test_an_empty_prompt_file(run: Run, errors: Errors) -> None:
    (error,) = errors("--data_path", run.file("empty.txt", "# nothing\n"))
    assert error == f"error: {run.folder}/empty.txt: no prompt in it. Write one prompt a line."


@pytest.mark.parametrize("key", ["deepspeed_config", "teacher_deepspeed_config", "student_config"])
def test_a_missing_json(run: Run, errors: Errors, key: str) -> None:
    assert errors(f"--{key}", f"{run.folder}/none.json") == [f"error: {run.folder}/none.json: no such file. Mend the path."]


def test_a_teacher_without_weights(run: Run, errors: Errors, copy_of: Callable[..., Path]) -> None:
    teacher = copy_of(Path(run.recipe["teacher_path"]))  # the JSON files alone
    parts = ("transformer", "transformer_2", "vae", "text_encoder")
    lines = [f"error: {teacher}: no .safetensors file in {part}/. Give the whole pipeline." for part in parts]
    assert errors("--teacher_path", str(teacher)) == lines


@pytest.mark.parametrize(("flag", "value"), [("--steps", "0"), ("--height", "-32"), ("--num_frames", "0"), ("--width", "40")])
def test_sampling_with_an_impossible_number(
    flag: str, value: str, tmp_path: Path, wan2: Path, one_rank: object, capsys: pytest.CaptureFixture
) -> None:
    sizes = {"--steps": "2", "--height": "32", "--width": "32", "--num_frames": "1"} | {flag: value}
    words = [w for pair in sizes.items() for w in pair]
    assert main(["sample", "--model", str(wan2), "--prompts", "x", "--output", str(tmp_path / "o"), *words]) == 2
    assert f"`{flag[2:]}` is {value}." in capsys.readouterr().err


def test_a_missing_recipe(run: Run, errors: Errors) -> None:
    assert errors("--recipe", f"{run.folder}/none.json") == [f"error: {run.folder}/none.json: no such file. Mend the path."]


def test_a_folder_that_is_no_wan_pipeline(run: Run, errors: Errors) -> None:
    (error,) = errors("--teacher_path", str(run.folder))
    assert error.startswith(f"error: {run.folder}: no file {run.folder}/model_index.json.")


@pytest.mark.parametrize(
    ("key", "content", "said"),
    [("student_config", {"num_layer": 2}, "`num_layer` is 2. There is no such key. Did you mean `num_layers`?"),
     ("deepspeed_config", DEEPSPEED | {"zero_optimisation": {}}, "Did you mean `zero_optimization`?"),
     ("deepspeed_config", DEEPSPEED | {"zero_optimization": {"offload_param": {"dvice": 1}}}, "Did you mean `device`?"),
     ("teacher_deepspeed_config", {"bf16": {"enable": True}}, "Did you mean `enabled`?")],
)  # fmt: skip
def test_an_unknown_key_at_any_level(run: Run, errors: Errors, key: str, content: dict, said: str) -> None:
    (error,) = errors(f"--{key}", run.file("x.json", content))
    assert error.startswith(f"error: {run.folder}/x.json: `") and error.endswith(said)


def test_an_unknown_recipe_key(run: Run, errors: Errors) -> None:
    run.recipe["max_step"] = 3
    (error,) = errors()
    assert error.endswith("recipe.json: `max_step` is 3. There is no such key. Did you mean `max_steps`?")


def test_an_unknown_objective(run: Run, errors: Errors) -> None:
    assert "Write one of: velocity" in errors("--objective", "velocitee")[0]


@pytest.mark.parametrize(
    ("objective", "said"),
    [({"name": "velocity", "data_weigth": 1}, "Did you mean `data_weight`?"),
     ({"data_weight": 2}, "Write a number from 0 to 1."), ({"data_weight": "much"}, "data_weight"),
     ({"name": 5}, "objective"), ({"name": ["velocity"]}, "objective")],
)  # fmt: skip
def test_a_wrong_setting_of_the_objective(run: Run, errors: Errors, objective: dict, said: str) -> None:
    run.recipe["objective"] = objective
    assert said in errors()[0]


@pytest.mark.parametrize(
    ("objective", "said"),
    [({"name": "feature", "blocks": [0, 2]}, "recipe: `objective.blocks` is [2]. Write block numbers from 0 to 1."),
     ({"name": "feature", "blocks": [0], "teacher_blocks": [4]},
      "recipe: `objective.teacher_blocks` is [4]. Write block numbers from 0 to 3.")],
)  # fmt: skip
def test_an_objective_for_blocks_that_are_not_there(run: Run, errors: Errors, objective: dict, said: str) -> None:
    run.recipe["objective"] = objective
    assert errors() == [f"error: {said}"]


def test_a_trajectory_without_a_step_for_each_expert(errors: Errors) -> None:
    (error,) = errors("--objective", "trajectory", "--rollout_steps", "1")
    assert "`rollout_steps` is 1: no step of the teacher's path begins below its boundary 0.875" in error


def test_a_trajectory_of_media(run: Run, errors: Errors) -> None:
    (run.folder / "a.png").touch()
    run.recipe["data_path"] = run.file("data.jsonl", json.dumps({"prompt": "a red circle", "image": "a.png"}))
    run.recipe["objective"] = ["velocity", "trajectory"]
    assert any("trajectory" in e and "a.png has none" in e for e in errors())


def test_heads_that_do_not_divide(run: Run, errors: Errors) -> None:
    content = {"init": "random", "num_attention_heads": 3}
    assert "does not divide the teacher's 2" in errors("--student_config", run.file("x.json", content))[0]


def test_more_layers_than_the_teacher(run: Run, errors: Errors) -> None:
    (error,) = errors("--student_config", run.file("x.json", {"num_layers": 9}))
    assert "`num_layers` is 9." in error and "has 4. Write at most that" in error


@pytest.mark.parametrize("key", ["height", "width"])
def test_a_size_that_is_no_multiple_of_16(errors: Errors, key: str) -> None:
    (error,) = errors(f"--{key}", "100")
    assert f"`{key}` is 100. This teacher needs a multiple of 16, e.g. 96." in error


def test_frames_that_are_not_4k_plus_1(errors: Errors) -> None:
    assert "Write 4k + 1" in errors("--num_frames", "8")[0]


def test_batch_numbers_that_do_not_multiply_up(run: Run, errors: Errors) -> None:
    content = DEEPSPEED | {"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 1}
    (error,) = errors("--deepspeed_config", run.file("x.json", content))
    assert "4 is not train_micro_batch_size_per_gpu 3 x gradient_accumulation_steps 1 x 1 ranks = 3" in error


TEACHERS = [
    ({"optimizer": {"type": "AdamW"}}, "`optimizer` is {\"type\": \"AdamW\"}. A frozen teacher takes none; remove this section."),
    ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
     "`zero_optimization.offload_param.nvme_path` is null. Write a folder on a fast disk."),
    ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}},
     "`zero_optimization.zero_hpz_partition_size` is 2. A frozen teacher needs no second part: remove it, and write "
     '"wandistiller": {"shards": "node"}, which keeps all its weights within a node.'),
    ({"wandistiller": {"shards": "nodes"}, "zero_optimization": {"stage": 3}},
     '`wandistiller.shards` is "nodes". Write world or node.'),
    ({"wandistiller": {"shards": "node"}},
     '`wandistiller.shards` is "node". Only an engine of stage 3 is cut: write it, or remove this.'),
    ({"zero_optimization": {"stage": 3, "zero_quantized_weights": True}},
     "`zero_optimization.zero_quantized_weights` is true. It would change the teacher's answers; remove it."),
    ({"wandistiller": {"placement": "owner", "owner_rank": 1}},
     "`wandistiller.owner_rank` is 1. There are 1 rank(s); write 0 to 0."),
    ({"wandistiller": {"placement": "ownr"}},
     '`wandistiller.placement` is "ownr". Write one of: engine, owner, host_cpu, device_map, auto. Did you mean `owner`?'),
    ({"wandistiller": {"placment": "owner"}},
     '`wandistiller.placment` is "owner". There is no such key. Did you mean `placement`?'),
    ({"wandistiller": {"placement": "host_cpu", "owner_rank": 0}},
     "`wandistiller.owner_rank` is 0. It means nothing for the placement host_cpu; remove it."),
    ({"wandistiller": {"placement": "owner"}, "zero_optimization": {"stage": 3}},
     "`zero_optimization.stage` is 3. The placement owner uses no ZeRO engine; write 0 or remove the section."),
    ({"wandistiller": {"guidance_passes": 3}}, "`wandistiller.guidance_passes` is 3. Write 1 or 2."),
    ({"wandistiller": "owner"}, '`wandistiller` is "owner". Write an object, {...}.'),
    ({"wandistiller": {"placement": "device_map", "device_map": "even"}},
     '`wandistiller.device_map` is "even". Write sequential, balanced, or {layer: device}.'),
    ({"wandistiller": {"placement": "device_map", "device_map": {"*": "gpu"}}},
     '`wandistiller.device_map` is "gpu". A device is a GPU\'s number, "cpu" or "disk".'),
    ({"wandistiller": {"placement": "device_map", "device_map": {"blocks": "cpu"}}},
     '`wandistiller.device_map` is {"blocks": "cpu"}. `patch_embedding` has no device. Add it, or `*` for the rest.'),
    ({"wandistiller": {"placement": "device_map", "device_map": {"blocks": "cpu", "*": 999}}},
     '`wandistiller.device_map` is {"blocks": "cpu", "*": 999}. It names GPU 999, but ' + (
         f"there are GPUs 0 to {torch.cuda.device_count() - 1} here." if torch.cuda.is_available() else
         'there is no GPU here; write "cpu" or "disk".')),
    ({"wandistiller": {"placement": "device_map", "max_memory": {"cpu": "20 gigs"}}},
     '`wandistiller.max_memory.cpu` is "20 gigs". Write a GPU\'s number or "cpu", and a size such as "20GiB".'),
    ({"wandistiller": {"placement": "device_map", "max_memory": 5}},
     '`wandistiller.max_memory` is 5. Write an object such as {"0": "20GiB", "cpu": "100GiB"}.'),
]  # fmt: skip


@pytest.mark.parametrize(("ds", "said"), TEACHERS)
def test_a_teacher_json_that_cannot_work(run: Run, errors: Errors, ds: dict, said: str) -> None:
    file = run.file("x.json", ds)
    assert errors("--teacher_deepspeed_config", file) == [f"error: {file}: {said}"]


def test_a_teacher_on_nvme_without_async_io(
    run: Run, errors: Errors, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "/bin/false")  # as where no compiler or no libaio is
    file = "ds_configs/teacher/zero_inference_nvme.json"
    (error,) = errors("--teacher_deepspeed_config", file)
    assert error.startswith(f"error: {file}: `zero_optimization.offload_param.device` is \"nvme\". DeepSpeed's async_io cannot")


def test_a_device_map_without_accelerate(run: Run, errors: Errors, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "find_spec", lambda name: None)
    (error,) = errors("--teacher_device_strategy", "sequential")
    assert error.endswith("the placement device_map needs accelerate. Run: pip install accelerate")


SHORTHANDS = [
    (["--teacher_on_cpu", "--teacher_device_strategy", "gpu"],
     'command line: `teacher_device_strategy` is "gpu". `teacher_on_cpu` is given too and means `cpu`. Keep one.'),
    (["--teacher_device_strategy", "cpu", "--teacher_deepspeed_config", "ds_configs/teacher/owner.json"],
     "command line: `teacher_device_strategy` is cpu, which means ds_configs/teacher/host_cpu.json, but "
     "`teacher_deepspeed_config` is ds_configs/teacher/owner.json. Keep one."),
    (["--teacher_dtype", "float32", "--teacher_deepspeed_config", "ds_configs/teacher/owner.json"],
     "command line: `teacher_dtype` is float32, but `teacher_deepspeed_config` names ds_configs/teacher/owner.json, which "
     "asks for bfloat16. Keep one."),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "said"), SHORTHANDS)
def test_a_shorthand_that_contradicts_another_setting(errors: Errors, flags: list[str], said: str) -> None:
    assert errors(*flags) == [f"error: {said}"]


def test_a_frozen_teacher_with_stage_2(run: Run, errors: Errors) -> None:
    (error,) = errors("--teacher_deepspeed_config", run.file("x.json", {"zero_optimization": {"stage": 2}}))
    assert "A frozen teacher has no optimizer" in error


def test_expert_blocks_that_split_a_micro_step(errors: Errors) -> None:
    assert "Write a divisor of that" in errors("--expert_blocks", "2")[0]


def test_a_checkpoint_that_is_none(run: Run, errors: Errors) -> None:
    assert "no checkpoint there" in errors("--resume", str(run.folder))[0]


@pytest.mark.parametrize("name", ["prompts.txt", "prompts.txt/out"])
def test_an_output_folder_that_cannot_be_made(run: Run, errors: Errors, name: str) -> None:
    run.output = run.folder / "never"
    assert any("output_dir" in error for error in errors("--output_dir", str(run.folder / name)))


def test_everything_wrong_in_every_file_is_reported_at_once(run: Run, errors: Errors) -> None:
    found = errors(
        "--data_path", "none.txt", "--height", "100", "--objective", "x",
        "--student_config", run.file("s.json", {"a": 1}), "--deepspeed_config", run.file("d.json", {"b": 1}),
        "--teacher_deepspeed_config", run.file("t.json", {"c": 1}),
    )  # fmt: skip
    assert len(found) == len(set(found)) == 8  # the student's JSON lacks batch and optimizer too


@pytest.mark.parametrize(
    ("flags", "said"),
    [(["--heigth", "5"], "unrecognized arguments"), (["--height", "tall"], "invalid int value"),
     (["--log_level", "loud"], "invalid choice")],
)  # fmt: skip
def test_a_wrong_flag_has_exit_code_2_too(run: Run, capsys: pytest.CaptureFixture, flags: list[str], said: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main(run.command(*flags))
    assert caught.value.code == 2 and said in capsys.readouterr().err


@pytest.mark.usefixtures("one_rank", "quiet_logging")
@pytest.mark.parametrize(
    ("argv", "said"),
    [(["export", "--checkpoint", "{}/none", "--output", "{}/out"], "no checkpoint there"),
     (["sample", "--model", "{}/none", "--prompts", "a", "--output", "{}/out"], "model_index.json"),
     (["sample", "--model", "{wan}", "--prompts", "{}/none.txt", "--output", "{}/out"], "no such file or folder"),
     (["sample", "--model", "{wan}", "--prompts", "a", "--output", "{}/out", "--height", "100"], "`height` is 100"),
     (["evaluate", "--student_path", "{}/none"], "wandistiller.json")],
)  # fmt: skip
def test_wrong_input_of_the_other_commands(run: Run, capsys: pytest.CaptureFixture, argv: list[str], said: str) -> None:
    assert main([a.replace("{}", str(run.folder)).replace("{wan}", run.recipe["teacher_path"]) for a in argv]) == 2
    (error,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert said in error and not run.output.exists()


def launched(run: Run, *launcher: str) -> subprocess.CompletedProcess:
    """The command as a user types it, in a process of its own, with two things wrong."""
    flags = ["--student_config", run.file("s.json", {"num_heads": 2}), "--data_path", str(run.folder / "none.txt")]
    ranks = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CROSS_RANK", "CROSS_SIZE", "LOCAL_SIZE"}
    environment = {k: v for k, v in os.environ.items() if k not in ranks} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, *launcher, "wandistiller", *run.command(*flags)]
    return subprocess.run(command, env=environment, cwd=run.folder, capture_output=True, text=True, timeout=300)


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


TWO_RANKS = ("-m", "deepspeed.launcher.runner", "--num_accelerators", "2", "--master_port", free_port(), "--module")


@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="two ranks need two GPUs, or none")
@pytest.mark.parametrize("launcher", [("-m",), TWO_RANKS], ids=["one rank", "two ranks under deepspeed"])
def test_each_message_comes_once_on_stderr_without_a_traceback(run: Run, launcher: tuple[str, ...]) -> None:
    done = launched(run, *launcher)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("error: ") == 2 and "Traceback" not in done.stderr + done.stdout
    assert done.stderr.count("`num_heads` is 2. There is no such key. Did you mean `num_attention_heads`?") == 1
    assert done.stderr.count("none.txt: no such file or folder.") == 1
    assert not run.output.exists()
