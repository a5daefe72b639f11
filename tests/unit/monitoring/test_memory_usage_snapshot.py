"""`--profile_memory`: torch's record of a GPU's memory in three steps."""

import pickle
from pathlib import Path

import pytest
from ranks import losses
from recipes import recipe, train

from wandistiller.config.run_config import RunConfig
from wandistiller.config.validate import read_job
from wandistiller.utils.errors import ConfigError


@pytest.mark.gpu
def test_a_gpu_s_memory_is_recorded_in_three_steps_and_no_loss_changes(tmp_path: Path, wan1: Path) -> None:
    settings = {"max_steps": 4, "sample_prompts": ["a circle"]}
    for name, flags in (("plain", []), ("recorded", ["--profile_memory", "2"])):
        train(tmp_path, wan1, name, *flags, ranks=1, accelerator="cuda", **settings)
    assert not (tmp_path / "plain" / "profile_memory").exists()
    record = pickle.loads((tmp_path / "recorded" / "profile_memory" / "rank_0.pickle").read_bytes())
    assert {"alloc", "free_completed"} <= {event["action"] for event in record["device_traces"][0]}
    assert losses(tmp_path / "plain") == losses(tmp_path / "recorded")


def problems(folder: Path, wan: Path, **more: object) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read_job(RunConfig(**recipe(folder, wan, output_dir=str(folder / "run"), max_steps=4, **more)), 1)
    return caught.value.problems


def test_a_machine_without_a_gpu_has_no_memory_to_record(
    tmp_path: Path, wan1: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert "there is none here" in problems(tmp_path, wan1, profile_memory=2)[0]
