"""What `wandistiller report` makes of a run: one page that needs nothing else, and its charts."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image
from ranks import wandistiller, write_json
from recipes import recipe

from wandistiller.charts import MOST_POINTS, Chart, Line, Scale, png, smooth, svg, thinned
from wandistiller.metrics import read_lines
from wandistiller.problems import ConfigError
from wandistiller.run_charts import run_charts
from wandistiller.run_report import report

VOID = {"meta", "br", "img"}


class Page(HTMLParser):
    """Counts what is open, and collects what would be fetched."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.images = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.images += tag == "img"
        self.fetched += [v for k, v in attrs if k in ("src", "href") and not (v or "").startswith("data:")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Of a drawing's parts, which have nothing within."""

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, wan1: Path) -> Path:
    folder = tmp_path_factory.mktemp("report")
    more = {"max_steps": 4, "objective": ["velocity", "feature"], "sample_every": 2}
    given = recipe(folder, wan1, output_dir=str(folder / "run <1>"), **more)
    wandistiller("train", "--recipe", write_json(folder / "recipe.json", given), ranks=2)
    table = "| on 2 prompts | student |\n|---|---|\n| right | 1 < 2 |"
    (folder / "run <1>" / "evaluation.md").write_text(f"# a\n\n{table}\n\nnotes\n")
    return folder / "run <1>"


def test_the_page_is_whole_and_fetches_nothing(finished: Path) -> None:
    text = report(finished)[0].read_text()
    page = Page(text)
    assert page.open == []
    assert page.fetched == [] and "http" not in text.partition("<pre>")[0] and "url(" not in text
    assert page.images == 2  # after steps 2 and 4


def test_the_page_has_curves_terms_memory_evaluation_and_settings(finished: Path) -> None:
    text = report(finished)[0].read_text()
    for words in ("loss by sigma", "loss of each term", "gradient norm", "throughput", "memory, GiB", "4 done", "1 &lt; 2",
                  "<tr><th>phase</th><th>CPU memory</th><th>CPU memory at most</th></tr><tr><td>start</td>",
                  "student_deepspeed.json", "teacher_deepspeed.json", "run &lt;1&gt;"):  # fmt: skip
        assert words in text, words
    assert "notes" not in text


def test_every_chart_is_a_picture_too(finished: Path) -> None:
    page, *files = report(finished)
    assert {"loss.png", "loss_by_sigma.png", "terms.png", "memory.png"} <= {file.name for file in files}
    assert all(Image.open(file).width == 640 for file in files) and page.name == "index.html"


@pytest.fixture
def begun(tmp_path: Path) -> Path:
    """A run that writes the line of its second step."""
    line = {"step": 1, "loss": 0.5, "grad_norm": None, "lr": 1e-3, "seconds": 2.0, "samples_per_second": 4.0, "memory_gib": {}}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n" + '{"step": 2, "lo')
    return tmp_path


def test_a_run_that_goes_on_is_reported_up_to_its_last_whole_line(begun: Path) -> None:
    text = report(begun)[0].read_text()
    assert "1 of ?" in text and "No evaluation yet" in text and "gradient norm" not in text


def test_an_alarm_that_was_cut_off_is_left_out(begun: Path) -> None:
    alarm = {"step": 1, "kind": "plateau", "alarm": "The loss stands still"}
    (begun / "alarms.jsonl").write_text(json.dumps(alarm) + "\n" + '{"step": 2, "kind": "pla')
    assert report(begun)[0].read_text().count("<td>step ") == 1


def test_pictures_are_found_where_the_run_put_them(begun: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("pictures")
    Image.new("RGB", (8, 8)).save(elsewhere / "step_00000001.png")
    (begun / "resolved").mkdir()
    write_json(begun / "resolved" / "run.json", {"sample_dir": str(elsewhere)})
    assert Page(report(begun)[0].read_text()).images == 1


def test_the_page_says_on_what_the_run_ran(begun: Path) -> None:
    node = {"host": "gpu<1>", "cpu": "Xeon", "cores": 96, "memory_gib": 1007.5, "ranks": 2, "gpus": ["NVIDIA H100"] * 2}
    said = {"launcher": "srun", "versions": {"python": "3.12.1", "torch": "2.13.0"}, "nodes": [node, node | {"gpus": []}]}
    (begun / "resolved").mkdir()
    write_json(begun / "resolved" / "machine.json", said)
    text = report(begun)[0].read_text()
    for words in ("<th>gpu&lt;1&gt;</th><td>2 rank(s), 2 x NVIDIA H100, Xeon, 96 cores, 1007.5 GiB", "2 rank(s), Xeon", "srun",
                  "python 3.12.1, torch 2.13.0"):  # fmt: skip
        assert words in text, words


def test_the_error_by_sigma_is_drawn_at_the_start_and_as_evaluated_in_one_unit(begun: Path) -> None:
    write_json(begun / "student_start.json", {"relative_velocity_error_by_sigma": {"0.0-0.25": 0.5, "0.25-0.5": 2.0}})
    bands = {"0-0.875": {"expert": "transformer_2", "value": 0.1}, "0.875-1": {"expert": "transformer", "value": None}}
    write_json(begun / "evaluation.json", {"relative_velocity_error": {"bands": bands}})
    start, end = run_charts(begun, read_lines(begun / "metrics.jsonl"))["error_by_sigma"].lines
    assert start.points == [(0.0, 0.25), (0.25, 0.25), (0.25, 4.0), (0.5, 4.0)]  # the file has the root
    assert end.points == [(0.0, 0.1), (0.875, 0.1)]
    assert "velocity error by sigma" in report(begun)[0].read_text()


def test_without_a_teacher_in_use_or_an_evaluation_there_is_no_error_by_sigma(begun: Path) -> None:
    assert "error_by_sigma" not in run_charts(begun, read_lines(begun / "metrics.jsonl"))


@pytest.mark.parametrize("content", [None, "", '{"st'])
def test_a_folder_without_a_step_is_no_run(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    with pytest.raises(ConfigError, match=str(tmp_path)):
        report(tmp_path)


def test_ticks_are_round_numbers() -> None:
    assert Scale(0, 10, 0, 1).ticks() == [0, 2, 4, 6, 8, 10]
    assert Scale(0, 0.07, 0, 1).ticks() == [0, 0.02, 0.04, 0.06]
    assert Scale(0.01, 1, 0, 1, True).ticks() == pytest.approx([0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1])
    assert Scale(1e-6, 1, 0, 1, True).ticks() == pytest.approx([1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1])


def test_an_axis_goes_from_end_to_end() -> None:
    assert [Scale(2, 4, 10, 20)(v) for v in (2, 3, 4)] == [10, 15, 20]
    assert [Scale(1, 100, 0, 2, True)(v) for v in (1, 10, 100)] == pytest.approx([0, 1, 2])


def test_long_lines_are_means_of_equal_parts() -> None:
    found = thinned([(i, i % 2) for i in range(2 * MOST_POINTS)])
    assert len(found) == MOST_POINTS and {y for _, y in found} == {0.5} and found[0][0] == 0.5


def test_a_smooth_line_is_the_mean_of_the_last() -> None:
    assert smooth([(1, 2.0), (2, float("nan")), (3, 4.0), (4, 8.0)], 2) == [(1, 2.0), (3, 3.0), (4, 6.0)]


@pytest.mark.parametrize("points", [[(1, 3.0)], [(1, 0.0), (2, 0.0)], [(1, -1.0), (2, 5.0)], [(5, 1e-30), (6, 1e30)]])
def test_any_line_can_be_drawn(points: list[tuple[float, float]], tmp_path: Path) -> None:
    chart = Chart("a < b", "unit", [Line("x & y", points)], True)
    numbers = [float(n) for pair in re.findall(r'points="([^"]*)"', svg(chart)) for n in re.split("[ ,]", pair)]
    assert numbers and all(0 <= n <= 640 for n in numbers) and "a &lt; b" in svg(chart)
    png(chart, tmp_path / "a.png")
