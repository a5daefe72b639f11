"""Ranks that were given other settings than rank 0 are told of it before they exchange anything else."""

from pathlib import Path

from on_ranks.agreeing import compared
from ranks import call
from recipes import SHARDED, recipe, student_engine

DIFFERENT = [
    {"max_steps": 21},
    {"save_every": 7, "sample_every": 7},
    {"prepare_batch": 3},
    {"deepspeed_config": student_engine(1)},
    {"deepspeed_config": student_engine(2, train_micro_batch_size_per_gpu=4)},
    {"teacher_deepspeed_config": SHARDED},
    {"seed": 5},
    {"resume_from": Path("run/checkpoints/step_00000005")},
    {"is_spent": True},
]
NAMED = """`max_steps`/`save_every`, `sample_every`/`prepare_batch`/`deepspeed_config`/`deepspeed_config`
/`teacher_deepspeed_config`/`seed`, `data`/`resume`/`is_spent`""".replace("\n", "").split("/")
ELSEWHERE = ["output_dir", "cache_dir", "sample_dir"]


def test_what_differs_is_named_on_both_ranks_but_for_the_names_of_folders(tmp_path: Path, wan1: Path) -> None:
    given = recipe(tmp_path, wan1, output_dir=str(tmp_path / "run"))
    same = [{}, {key: str(tmp_path / "other" / key) for key in ELSEWHERE}]
    found = call(compared, given, DIFFERENT + same, ranks=2)
    assert found[0] == found[1] and found[0][len(DIFFERENT) :] == [[], []]
    begin, end = "The ranks read different settings or data: ", ", on rank 1 other than on rank 0. A file"
    messages = [message for (message,) in found[0][: len(DIFFERENT)]]
    assert [message.removeprefix(begin).partition(end)[0] for message in messages] == NAMED
