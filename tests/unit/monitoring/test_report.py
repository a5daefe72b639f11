"""`wandistiller report`: one page that needs nothing else."""

import base64
import json
import shutil
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from PIL import Image
from ranks import write_json

from wandistiller.monitoring.charts import MOST_POINTS, smooth, thinned
from wandistiller.monitoring.metrics import read_lines
from wandistiller.monitoring.report import report, run_charts
from wandistiller.utils.errors import ConfigError
from wandistiller.utils.images import save_clips, save_grid

VOID = {"meta", "br", "img"}


class Page(HTMLParser):
    """Checks that tags are balanced; collects the names of images and what would be fetched."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.images: list[str] = []
        self.videos: list[dict[str, str | None]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.images += [value or "" for name, value in attrs if (tag, name) == ("img", "alt")]
        self.videos += [dict(attrs)] if tag == "video" else []
        self.fetched += [
            v for k, v in attrs if k in ("src", "href", "poster") and not (v or "").startswith("data:")
        ]
        if tag not in VOID:
            self.open.append(f"{tag} {dict(attrs).get('class', '')}".strip())

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop().split()[0] == tag


@pytest.fixture(scope="module")
def page(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    output = shutil.copytree(finished, tmp_path_factory.mktemp("report") / "run <1>")
    table = "| on 2 prompts | student |\n|---|---|\n| right | 1 < 2 |"
    (output / "evaluation.md").write_text(f"# a\n\n{table}\n\nnotes\n")
    return report(output).read_text()


CURVES = "loss|loss by sigma|loss of each term|gradient norm|learning rate|samples a second"
WORDS = "4 done|1 &lt; 2|student_deepspeed.json|teacher_deepspeed.json|run &lt;1&gt;"
HEAD = "<tr><th>phase</th><th>CPU memory</th><th>CPU memory at most</th></tr><tr><th>start</th>"


@pytest.mark.slow
def test_the_page_has_curves_memory_evaluation_and_settings_and_fetches_nothing(page: str) -> None:
    read = Page(page)
    assert read.open == []
    assert read.fetched == [] and "http" not in page.partition("<pre>")[0] and "url(" not in page
    assert {*CURVES.split("|"), "memory while training", "velocity error by sigma"} <= set(read.images)
    assert read.images[:2] == ["step_00000004", "step_00000002"]
    assert [words for words in (*WORDS.split("|"), HEAD) if words not in page] == []
    assert "notes" not in page


@pytest.fixture
def begun(tmp_path: Path) -> Path:
    """Return the output of a run whose second step's line is incomplete."""
    line = {"step": 1, "loss": 0.5, "grad_norm": None, "lr": 1e-3, "seconds": 2.0}
    line |= {"samples_per_second": 4.0, "memory_gib": {}}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n" + '{"step": 2, "lo')
    return tmp_path


def test_a_run_that_goes_on_is_reported_up_to_its_last_whole_lines(begun: Path) -> None:
    alarm = {"step": 1, "kind": "blow-up", "alarm": "The loss has grown"}
    (begun / "alarms.jsonl").write_text(json.dumps(alarm) + "\n" + '{"step": 2, "kind": "pla')
    text = report(begun).read_text()
    assert "1 of ?" in text and "No evaluation yet" in text and "gradient norm" not in Page(text).images
    assert text.count("<th>step ") == 1


def test_pictures_are_read_from_the_run_s_sample_dir(begun: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "pictures"
    elsewhere.mkdir()
    Image.new("RGB", (8, 8)).save(elsewhere / "step_00000001.png")
    (begun / "resolved").mkdir()
    write_json(begun / "resolved" / "run.json", {"sample_dir": str(elsewhere)})
    assert Page(report(begun).read_text()).images[:1] == ["step_00000001"]


def test_the_error_by_sigma_is_charted_at_the_start_and_as_evaluated_in_one_unit(begun: Path) -> None:
    lines = read_lines(begun / "metrics.jsonl")
    assert "error_by_sigma" not in run_charts(begun, lines)  # without a teacher in use or an evaluation
    start = {"relative_velocity_error_by_sigma": {"0.0-0.25": 0.5, "0.25-0.5": 2.0}}
    write_json(begun / "student_start.json", start)
    values = {"0-0.875": ("transformer_2", 0.1), "0.875-1": ("transformer", None)}
    bands = {band: {"expert": expert, "value": value} for band, (expert, value) in values.items()}
    write_json(begun / "evaluation.json", {"relative_velocity_error": {"bands": bands}})
    start, end = run_charts(begun, lines)["error_by_sigma"].lines
    assert start.points == [(0.0, 0.25), (0.25, 0.25), (0.25, 4.0), (0.5, 4.0)]  # the file has the root
    assert end.points == [(0.0, 0.1), (0.875, 0.1)]
    assert "velocity error by sigma" in Page(report(begun).read_text()).images


@pytest.mark.parametrize("content", [None, "", '{"st'])
def test_a_folder_without_a_step_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    with pytest.raises(ConfigError, match=str(tmp_path)):
        report(tmp_path)


def test_long_lines_are_means_of_equal_parts() -> None:
    points = thinned([(i, i % 2) for i in range(2 * MOST_POINTS)])
    assert len(points) == MOST_POINTS and {y for _, y in points} == {0.5} and points[0][0] == 0.5


def test_a_smooth_line_is_the_mean_of_the_last() -> None:
    assert smooth([(1, 2.0), (2, float("nan")), (3, 4.0), (4, 8.0)], 2) == [(1, 2.0), (3, 3.0), (4, 6.0)]


def test_a_smooth_line_is_exact_again_after_a_value_that_is_out_of_all_proportion() -> None:
    points = [(step, 1e20 if step == 3 else 0.25) for step in range(9)]
    assert smooth(points, 2)[5:] == [(step, 0.25) for step in range(5, 9)]


def test_an_unknown_metric_is_charted_by_its_name(begun: Path) -> None:
    values = ((1, 0.5, 1.0), (2, 0.25, 3.0))
    lines = [{"step": step, "critic_lag": lag, "by_role": {"critic": role}} for step, lag, role in values]
    charts = run_charts(begun, lines)
    (lag,), (role,) = charts["critic_lag"].lines, charts["by_role"].lines
    assert charts["critic_lag"].title == "critic lag" and lag.points == [(1, 0.5), (2, 0.25)]
    assert (role.name, role.points) == ("critic", [(1, 1.0), (2, 3.0)])


def test_a_chart_without_a_finite_number_is_left_out(begun: Path) -> None:
    sample = {"step": 1, "deviation": {"student": float("nan")}, "motion": {"student": 0.5}}
    (begun / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    images = Page(report(begun).read_text()).images
    assert "motion of samples" in images and "spread of samples" not in images


def test_without_matplotlib_the_error_has_the_command(begun: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install 'wandistiller\[report\]'"):
        report(begun)
    assert not (begun / "report").exists()


CLIP_CFHW = torch.linspace(0, 1, 3).view(1, 3, 1, 1).expand(3, 3, 32, 32)


def drawn(stem: Path) -> dict[str, bytes]:
    """Write a picture and its animation; return them by suffix."""
    save_grid(stem.with_suffix(".png"), {"teacher": [CLIP_CFHW[:, 1]]}, ["a circle"])
    save_clips(stem.with_suffix(".mp4"), {"teacher": [CLIP_CFHW]}, ["a circle"], fps=8)
    return {suffix: stem.with_suffix(suffix).read_bytes() for suffix in (".png", ".mp4")}


def decoded(source: str | None) -> bytes:
    return base64.b64decode((source or "").partition(",")[2])


def test_the_page_plays_the_animation_of_an_evaluation_of_clips_and_shows_its_warning(begun: Path) -> None:
    files = drawn(begun / "evaluation")
    (begun / "evaluation.md").write_text("| a |\n|---|\n\n**Slow motion**: the student moves less.\n\nnotes")
    page = Page(text := report(begun).read_text())
    (video,) = page.videos
    assert decoded(video["src"]) == files[".mp4"] and decoded(video["poster"]) == files[".png"]
    assert "<p>Slow motion: the student moves less.</p>" in text and page.open == []


def test_clips_of_training_play_without_sound_inside_the_page_and_the_last_at_once(begun: Path) -> None:
    (begun / "samples").mkdir()
    files = [drawn(begun / "samples" / f"step_{step:08d}") for step in (2, 1)]
    page = Page(report(begun).read_text())
    assert [decoded(video["src"]) for video in page.videos] == [of[".mp4"] for of in files]
    assert [decoded(video["poster"]) for video in page.videos] == [of[".png"] for of in files]
    assert ["autoplay" in video for video in page.videos] == [True, False]
    assert all({"controls", "loop", "muted", "playsinline"} <= video.keys() for video in page.videos)
    assert page.images[:1] == ["step_00000002"]  # its frames, one by one
