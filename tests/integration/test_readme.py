"""Every command and Python block of the texts: run on the embedded teacher where that is cheap, else dry."""

import ast
import json
import re
from pathlib import Path

import pytest
from image_data import image_data
from markdown_pages import (
    AFTER_A_RUN,
    DOCS,
    PAGES,
    VIDEOS,
    Command,
    blocks,
    commands,
    plain,
    table_rows,
    text,
    unique,
)
from published_wan import PUBLISHED, write_wans
from ranks import ROOT, has_async_io
from slow_cases import slow_but
from styles import write_users_files

from wandistiller.cli.main import main
from wandistiller.cli.parser import parser
from wandistiller.cli.plan import MACHINE
from wandistiller.teacher.strategies import strategies
from wandistiller.utils.files import read_json, shipped

SIXTY_WORDS = "prompt {} of sixty words" + " such as people write of a scene" * 8
PLANS = unique({"plan"})
RECOMMENDING = [c for c in PLANS if "--recommend" in c.words]
RECOMMENDED = {c.value("--recommend") for c in RECOMMENDING}
OF_MACHINES = {c.ours[:3]: c.ours[3:] for page in ("README.md", "docs/student.md") for c in commands(page)}
"""The lines of the rows of the README's table."""
DRY = [c for c in unique({"train", "prepare"}) if c.value("--recipe") not in RECOMMENDED]
QUICK = "deepspeed --module wandistiller train --recipe ds_configs/recipes/quickstart.json"
OF_PLACEMENTS = [
    Command(line, tuple(line.split()))
    for file in sorted((ROOT / "ds_configs" / "teacher").glob("*.json"))
    for line in [f"{QUICK} --teacher_deepspeed_config ds_configs/teacher/{file.name}"]
]
MISSING_HERE = re.compile(
    r"\.safetensors file|are free|1 rank\(s\)|describe it there|runs/(quickstart|style_pictures)|despite_plan"
)
MACHINES = table_rows("README.md", r"\d+ x \d+ GB \|")
LEAST = table_rows("docs/memory.md", r"\d+ x \d+ GB, least")
ADAPTERS = table_rows("docs/lora.md", r"\d+ x \d+ GB, \d+ GiB")
FIRST_FRAMES = table_rows("docs/image_to_video.md", r"\d+ x \d+ GB, \d+ GiB")
FEW_STEPS = table_rows("ds_configs/recipes/README.md", r"`\d+x\d+_")


def named(command: Command) -> str:
    return " ".join(command.ours)[-70:]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with published pipelines' JSON files under their hub names, and files of a user."""
    monkeypatch.chdir(write_wans(tmp_path))
    image_data(tmp_path)
    write_users_files(tmp_path)
    return tmp_path


def test_the_texts_have_a_training_command_for_every_published_wan() -> None:
    recipes = [read_json(file) for c in DRY if (file := c.value("--recipe"))]
    teachers = {c.value("--teacher_path") for c in DRY} | {recipe["teacher_path"] for recipe in recipes}
    assert teachers >= set(PUBLISHED)


@pytest.mark.usefixtures("folder", "quiet_logging")
@pytest.mark.parametrize(
    "command",
    slow_but(
        [c for c in DRY if c.line.endswith("--recipe ds_configs/recipes/quickstart.json")],
        DRY + OF_PLACEMENTS,
    ),
    ids=named,
)
def test_a_dry_run_of_a_training_command_misses_only_weights_and_a_machine(
    command: Command, capfd: pytest.CaptureFixture
) -> None:
    if "nvme" in command.line and not has_async_io():
        pytest.skip("no libaio here")
    if file := re.search(r"echo '(.*)' > (\S+)", text("docs/export.md")):  # a student config that one names
        Path(file[2]).write_text(file[1])
    code = main([*(word for word in command.ours if word != "--dry_run"), "--dry_run"])
    problems = re.findall(r"^error: (.*)", capfd.readouterr().err, re.MULTILINE)
    assert [p for p in problems if not MISSING_HERE.search(p)] == [] and code == (2 if problems else 0)


def recipe_of(row: list[str]) -> str:
    """The machine recipe that a row of the README's table is about."""
    return row[-1].strip("`")


def in_stages(row: list[str]) -> str:
    """The machine recipe that a row of the recipes in stages is about."""
    name = row[0].strip("`")
    return name if name.endswith("_step") else f"{name}_few_step"


def in_hours(printed: str, before: str) -> list[float]:
    """Hours of the durations in a text that stand before what a regular expression matches."""
    found = re.findall(rf"([\d.]+) (h|min|s) {before}", printed)
    return [float(number) / {"h": 1, "min": 60, "s": 3600}[unit] for number, unit in found]


def test_every_machine_recipe_has_a_row_in_a_table() -> None:
    recipes = {file.stem for file in (ROOT / "ds_configs" / "machines").glob("*.json")}
    few = {*map(in_stages, FEW_STEPS)}
    adapters, images = ({cells[1].strip("`") for cells in rows} for rows in (ADAPTERS, FIRST_FRAMES))
    assert {*map(recipe_of, MACHINES)} | few | adapters | images | {*VIDEOS} == recipes
    assert images == {name for name in recipes if "_i2v_" in name}


def machine_of(gpus: str, each: str, host: str) -> list[str]:
    return f"--gpus {gpus} --gpu_memory {each} --host_memory {host} --disk 1800".split()


def planned(recipe: str, machine: list[str], capsys: pytest.CaptureFixture) -> str:
    """The output of `plan` for a recipe."""
    capsys.readouterr()
    assert main(["plan", "--recipe", recipe, *machine]) == 0
    return capsys.readouterr().out


@pytest.fixture
def many_prompts(folder: Path) -> None:
    (folder / "prompts.txt").write_text("\n".join(map(SIXTY_WORDS.format, range(10_000))))


def numbers_of(row: list[str]) -> list[str]:
    return re.findall(r"[\d.]+", " ".join([row[0], *row[2:]]).replace(",", ""))


def assert_row_is_printed(row: list[str], printed: str) -> None:
    _, _, student, device, host, _, disk, prompts, prepare, train = numbers_of(row)
    fits = [float(gib) for gib in re.findall(r"^fits: ([\d.]+) of", printed, re.MULTILINE)]
    assert "NOT fit" not in printed and [round(gib) for gib in fits[:2]] == [int(device), int(host)]
    assert fits[2] == pytest.approx(int(disk), abs=2)  # the cache is as large as the prompts are long
    parameters = float(re.search(r"^student +([\d.]+)M", printed, re.MULTILINE)[1])
    assert f"{parameters / 1000:.1f}" == student
    assert f"the data have {prompts}," in printed
    hours = [in_hours(printed, r"for \d+ steps")[0], in_hours(printed, "for the teacher's rollouts")[0]]
    assert hours == pytest.approx([int(train), int(prepare)], abs=0.5)


@pytest.mark.slow
@pytest.mark.usefixtures("many_prompts", "quiet_logging")
@pytest.mark.parametrize("row", MACHINES, ids=recipe_of)
def test_a_row_of_the_readme_is_what_plan_prints(row: list[str], capsys: pytest.CaptureFixture) -> None:
    machine, wan, makes, device, host, disk, hours, _ = row
    (count, each), (of_run, of_host) = re.findall(r"\d+", machine), host.split(" of ")
    recipe = f"ds_configs/machines/{recipe_of(row)}.json"
    words = [*OF_MACHINES["plan", "--recipe", recipe]]
    assert words[:6] == machine_of(count, each, of_host)[:6] and ("train", "--recipe", recipe) in OF_MACHINES
    printed = planned(recipe, words, capsys)
    fits = [float(gib) for gib in re.findall(r"^fits: ([\d.]+) of", printed, re.MULTILINE)]
    assert "NOT fit" not in printed and re.search(wan.replace(" ", ".*"), read_json(recipe)["teacher_path"])
    assert [f"{max(fits[kind::3]):.0f}" for kind in (0, 1)] == [device, of_run]
    assert max(fits[2::3]) == pytest.approx(int(disk), abs=2)  # the cache is as large as the prompts are long
    prepare, _, training = hours.rpartition(" + ")
    assert in_hours(printed, r"for \d+ steps") == pytest.approx([*map(float, training.split(", "))], abs=0.6)
    assert not prepare or in_hours(printed, "for the teacher's rollouts")[0] == pytest.approx(
        int(prepare), abs=0.5
    )
    if student := re.search(r"student of ([\d.]+)B", makes):
        parameters = float(re.search(r"^student +([\d.]+)M", printed, re.MULTILINE)[1])
        assert f"{parameters / 1000:.1f}" == student[1]


@pytest.mark.slow
@pytest.mark.usefixtures("many_prompts", "quiet_logging")
@pytest.mark.parametrize("line", [c.ours for c in PLANS if c.ours[:3] not in OF_MACHINES], ids=str)
def test_a_plan_of_another_page_fits_the_machine_in_its_line(line: tuple[str, ...]) -> None:
    assert main([*line]) == 0


@pytest.mark.slow
@pytest.mark.usefixtures("many_prompts", "quiet_logging")
def test_the_row_for_little_cpu_memory_is_what_plan_recommends(capsys: pytest.CaptureFixture) -> None:
    (row,), (count, each, _, _, _, of_host, *_) = LEAST, numbers_of(LEAST[0])
    (command,) = [c for c in RECOMMENDING if c.value("--recommend") == "runs/least.json"]
    machine = machine_of(count, each, of_host)
    assert command.ours[3:-2] == tuple(machine) and main([*command.ours]) == 0
    assert_row_is_printed(row, planned("runs/least.json", machine, capsys))


@pytest.mark.slow
@pytest.mark.usefixtures("folder", "quiet_logging")
@pytest.mark.parametrize("command", RECOMMENDING, ids=named)
def test_what_plan_recommends_fits_the_same_machine(command: Command, capsys: pytest.CaptureFixture) -> None:
    assert main([*command.ours]) == 0
    machine = [
        w for key in MACHINE for w in (f"--{key}", command.value(f"--{key}")) if command.value(f"--{key}")
    ]
    printed = planned(command.value("--recommend"), machine, capsys)
    assert "\nfits: " in printed and "NOT fit" not in printed


@pytest.mark.slow
@pytest.mark.usefixtures("many_prompts", "quiet_logging")
@pytest.mark.parametrize("row", FEW_STEPS, ids=lambda row: row[0])
def test_a_row_of_the_recipes_in_stages_is_what_plan_prints(
    row: list[str], capsys: pytest.CaptureFixture
) -> None:
    numbers = re.findall(r"[\d.]+", " ".join([row[1].partition(",")[0], *row[2:]]))
    student, device, host, of_host, disk, prepare, *hours = numbers
    count, each = row[0].strip("`").partition("_")[0].split("x")
    recipe = f"ds_configs/machines/{in_stages(row)}.json"
    printed = planned(recipe, machine_of(count, each, of_host), capsys)
    fits = [float(gib) for gib in re.findall(r"^fits: ([\d.]+) of", printed, re.MULTILINE)]
    gpu, cpu, on_disk = (max(fits[kind::3]) for kind in (0, 1, 2))
    assert "NOT fit" not in printed and [f"{gib:.0f}" for gib in (gpu, cpu)] == [device, host]
    assert on_disk == pytest.approx(int(disk), abs=2)  # the cache is as large as the prompts are long
    assert [f"{h:.0f}" for h in in_hours(printed, r"for \d+ steps")] == hours
    assert f"{in_hours(printed, 'for the teacher')[0]:.0f}" == prepare
    parameters = float(re.search(r"^student +([\d.]+)M", printed, re.MULTILINE)[1])
    assert f"{parameters / 1000:.1f}" == student.rstrip(".")


@pytest.mark.slow
@pytest.mark.usefixtures("many_prompts", "quiet_logging")
@pytest.mark.parametrize("row", ADAPTERS, ids=lambda row: "_".join(row[:3]))
def test_a_row_of_adapters_is_what_plan_prints(row: list[str], capsys: pytest.CaptureFixture) -> None:
    machine, recipe, frames, device, host, disk, hours, flags = row
    words = [*machine_of(*re.findall(r"\d+", machine)), *flags.strip("`").split()]
    printed = planned(f"ds_configs/machines/{recipe.strip('`')}.json", words, capsys)
    fits = [float(gib) for gib in re.findall(r"^fits: ([\d.]+) of", printed, re.MULTILINE)]
    assert "NOT fit" not in printed and f"480x832, {frames} frame(s)" in printed
    assert [f"{max(fits[kind::3]):.0f}" for kind in (0, 1)] == [device, host]
    assert max(fits[2::3]) == pytest.approx(int(disk), abs=2)  # the cache is as large as the prompts are long
    assert in_hours(printed, r"for \d+ steps") == pytest.approx([*map(float, hours.split(", "))], abs=0.6)


@pytest.mark.slow
@pytest.mark.usefixtures("quiet_logging")
@pytest.mark.parametrize("row", FIRST_FRAMES, ids=lambda row: "_".join(row[1:3]))
def test_a_row_of_image_to_video_recipes_is_what_plan_prints(
    row: list[str], folder: Path, capsys: pytest.CaptureFixture
) -> None:
    machine, recipe, frames, *expected, prepare, hours, flags = row
    rows = ({"prompt": SIXTY_WORDS.format(i), "image": f"{i % 6}.png"} for i in range(10_000))
    (folder / "first_frames.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = [*machine_of(*re.findall(r"\d+", machine)), *flags.strip("`").split()]
    printed = planned(f"ds_configs/machines/{recipe.strip('`')}.json", words, capsys)
    fits = [float(gib) for gib in re.findall(r"^fits: ([\d.]+) of", printed, re.MULTILINE)]
    assert "NOT fit" not in printed and f"480x832, {frames} frame(s)" in printed
    assert [max(fits[kind::3]) for kind in (0, 1, 2)] == pytest.approx([*map(int, expected)], abs=0.6)
    made = in_hours(printed, "for the teacher's rollouts")[:1] or [0]
    assert made == pytest.approx([float(prepare)], abs=0.6)
    assert in_hours(printed, r"for \d+ steps") == pytest.approx([*map(float, hours.split(", "))], abs=0.6)


def test_each_other_command_names_what_is_there() -> None:
    ours = {"train", "prepare", "plan", "doctor", *AFTER_A_RUN}
    for page in PAGES:
        for command in commands(page):
            words = command.words
            if words == ("source", ".venv/bin/activate"):
                assert ".venv/bin/pip" in text("launch/env.sh")
            elif words[0] == "bash" and not command.ours:
                assert (ROOT / words[1]).is_file()
            elif words[:2] == ("python", "-m"):  # run by tests/unit/tiny
                assert (ROOT / f"{words[2].replace('.', '/')}.py").is_file()
            else:
                assert words[0] == "echo" or command.ours[0] in ours, f"{page}: no test runs `{command.line}`"


@pytest.mark.parametrize("page", PAGES)
def test_flags_and_files_of_commands_within_the_text_are_known(page: str) -> None:
    choices = next(a.choices for a in parser()._actions if a.dest == "command")
    for span in re.findall(r"`((?:wandistiller|python|bash) [^`]+)`", plain(page)):
        words = span.split()
        flags = {word for word in words if word.startswith("--")}
        if words[0] == "wandistiller" and words[1] in choices:
            assert flags <= {*choices[words[1]]._option_string_actions}, words
        elif words[0] == "python" and words[1] == "-m":
            module = ROOT / Path(*words[2].split("."))
            assert any(file.is_file() for file in (module.with_suffix(".py"), module / "__main__.py")), words
        elif words[0] == "python":
            nodes = ast.walk(ast.parse(text(words[1])))
            assert flags <= {node.value for node in nodes if isinstance(node, ast.Constant)}, words
        elif words[0] == "bash":
            assert (ROOT / words[1]).is_file(), words


def test_tests_that_the_texts_select_are_there() -> None:
    files = " ".join(file.name for file in (ROOT / "tests").rglob("test_*.py"))
    for page in PAGES:
        for words in re.findall(r"test\.sh [^`\n]*-k \"?([\w ]+)", text(page)):
            assert all(word in files for word in words.split(" or ")), f"{page}: -k {words}"


@pytest.mark.parametrize("page", PAGES)
def test_modules_that_a_page_names_are_there(page: str) -> None:
    folders = {file.parent.name for file in (ROOT / "wandistiller").glob("*/__init__.py")}
    moved = text(page).partition("## Modules that moved")[2].partition("\n## ")[0]
    names = [f"{name.replace('.', '/')}.py" for name in re.findall(r"`(\w+\.\w+)`", moved)]
    for name in names + re.findall(r"`([\w/.]+/[a-z]\w*\.py)`", plain(page)):
        at = ROOT / ("wandistiller" if name.split("/")[0] in folders else "")
        assert (at / name).is_file(), f"{page}: {name}"


def test_the_readme_links_every_guide_page() -> None:
    assert all(f"({page})" in text("README.md") for page in DOCS)


def test_the_guide_for_contributors_names_every_folder_of_the_package() -> None:
    folders = {file.parent.name for file in (ROOT / "wandistiller").glob("*/__init__.py")}
    assert all(f"`{name}/`" in text("CONTRIBUTING.md") for name in folders)


@pytest.mark.parametrize(("page", "lines"), [("README.md", 150), ("ds_configs/README.md", 180)])
def test_a_first_page_is_short(page: str, lines: int) -> None:
    assert len(text(page).splitlines()) <= lines


def test_the_table_of_placements_has_a_row_for_every_teacher_json() -> None:
    jsons = {file.name for file in (ROOT / "ds_configs" / "teacher").glob("*.json")}
    rows = table_rows("ds_configs/README.md", r"`\w+\.json`")
    assert {name for row in rows if len(row) == 5 for name in re.findall(r"`(\w+\.json)`", row[0])} == jsons
    short = {short: row[0] for row in rows if len(row) == 5 and (short := row[1].strip("`"))}
    assert all(f"`{strategies()[name]}.json`" in cell for name, cell in short.items())
    assert short.keys() | {file.removesuffix(".json") for file in jsons} == strategies().keys()


def test_every_recipe_has_a_command_and_every_student_a_row() -> None:
    named = [Path(c.value("--recipe")) for c in commands("ds_configs/recipes/README.md")]
    used = {file.name for file in named if file.parent.name == "recipes"}
    assert used == {file.name for file in (ROOT / "ds_configs" / "recipes").glob("*.json")}
    students = (ROOT / "ds_configs" / "students").glob("*.json")
    assert all(f"| `{file.name}`" in text("docs/student.md") for file in students)


def test_the_table_of_launchers_has_every_script() -> None:
    linked = set(re.findall(r"\]\((\w+\.\w+)\)", text("launch/README.md")))
    kinds = (".sh", ".sbatch", ".example")
    there = {file.name for file in (ROOT / "launch").iterdir() if file.suffix in kinds}
    assert there - {"env.sh"} == linked


@pytest.mark.parametrize("page", PAGES)
def test_every_json_that_a_page_names_is_shipped(page: str) -> None:
    folders = "student|teacher|students|recipes|machines"
    for name in re.findall(rf"ds_configs/(?:{folders})/[a-z\d][\w.]*\.json", text(page)):
        assert shipped(name).is_file(), name


def test_the_recipe_with_comments_of_the_readme_is_the_one_of_its_command() -> None:
    (block,) = blocks("jsonc", "README.md")
    recipe = json.loads(re.sub(r" +// .*", "", block))
    assert recipe == json.loads(text("ds_configs/machines/1x24_wan2.2_a14b_style.json"))


def test_json_of_the_texts_is_json() -> None:
    for page in PAGES:
        for block in blocks("json", page):
            value = json.loads(block if block.startswith("{") else "{" + block + "}")
            assert isinstance(value, dict)
