"""The wheel carries all that the commands need."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import ROOT, environment, metrics, run
from slow_cases import slow_but

from wandistiller import __version__

QUICK = "--recipe ds_configs/recipes/quickstart.json"
PLAN = f"plan {QUICK} --gpus 1 --gpu_memory 24 --host_memory 32 --disk 100"
WHEEL = "pip wheel -q --no-deps --no-build-isolation -w"


@pytest.fixture(scope="module", params=slow_but(["wheel"], ["wheel", "sdist"]))
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which pip has installed this package alone, by a wheel of this folder or of the sdist."""
    folder, source = tmp_path_factory.mktemp("site"), ROOT
    if request.param == "sdist":
        made = tmp_path_factory.mktemp("distribution")
        run([sys.executable, "setup.py", "-q", "sdist", "--dist-dir", str(made)])
        source = next(made.glob("wandistiller-*"))
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-compile"]
    run([*pip, "--target", str(folder), str(source)])
    return folder


@pytest.mark.parametrize("part", ["wandistiller", "ds_configs"])
def test_installation_holds_every_tracked_file_but_the_makers_of_the_teachers(part: str, site: Path) -> None:
    tracked = run(["git", "ls-files", part]).stdout.split()
    folder = site if part == "wandistiller" else site / "wandistiller"
    missing = {file for file in tracked if not (folder / file).is_file()}
    assert tracked and missing == {file for file in tracked if file.startswith("wandistiller/tiny/making/")}


def test_the_installed_package_finds_its_data_outside_the_checkout(site: Path, tmp_path: Path) -> None:
    code = "from wandistiller.utils.files import TINY, shipped; "
    code += "print(*TINY.values(), shipped('ds_configs/recipes/quickstart.json'), sep='\\n')"
    found = run([sys.executable, "-c", code], cwd=tmp_path, PYTHONPATH=str(site)).stdout.splitlines()
    assert len(found) > 1 and all(Path(path).exists() and path.startswith(str(site)) for path in found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "printed"),
    [
        ("doctor", "software "),
        (PLAN, "a step takes about"),
        (f"train {QUICK} --output_dir run --dry_run", "1008 rows, 0 with an image or video"),
    ],
    ids=["doctor", "plan", "train"],
)
def test_the_installed_command_works_outside_the_checkout(
    command: str, printed: str, site: Path, tmp_path: Path
) -> None:
    done = run([str(site / "bin" / "wandistiller"), *command.split()], cwd=tmp_path, PYTHONPATH=str(site))
    assert printed in done.stdout + done.stderr and not (tmp_path / "run").exists()


def test_the_version_is_the_one_in_the_package(site: Path, tmp_path: Path) -> None:
    done = run([str(site / "bin" / "wandistiller"), "--version"], cwd=tmp_path, PYTHONPATH=str(site))
    assert done.stdout.split()[-1] == __version__
    assert (site / f"wandistiller-{__version__}.dist-info").is_dir()


NEWEST = "3.13"
"""The newest Python that setup.py promises."""


def newest_python() -> str | None:
    """An interpreter of that version on the path, or among pyenv's."""
    places = [shutil.which(f"python{NEWEST}"), *Path.home().glob(f".pyenv/versions/{NEWEST}.*/bin/python")]
    works = (str(p) for p in places if p and not subprocess.run([p, "-V"], capture_output=True).returncode)
    return next(works, None)


def test_the_newest_promised_python_is_the_one_that_is_tested() -> None:
    major, minor = map(int, NEWEST.split("."))
    assert f'python_requires=">=3.11,<{major}.{minor + 1}"' in (ROOT / "setup.py").read_text()


@pytest.mark.slow
@pytest.mark.skipif(not newest_python(), reason=f"there is no Python {NEWEST} here")
def test_a_fresh_environment_of_the_newest_promised_python_trains_from_a_checkout_and_from_the_wheel(
    tmp_path: Path,
) -> None:
    for name in run(["git", "ls-files"]).stdout.splitlines():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    train = f"wandistiller train {QUICK} --output_dir run --max_steps 2 --rollouts_per_prompt 1"
    alone = f"{WHEEL} dist .; pip uninstall -qy wandistiller; pip install -q dist/*; cd dist; {train}"
    script = f"source launch/env.sh; wandistiller doctor; {train}; {alone}"
    own = ("VIRTUAL_ENV", "TORCH_EXTENSIONS_DIR", "PYTHONPATH", "DS_ACCELERATOR")
    env = {k: v for k, v in environment().items() if k not in own} | {"PYTHON": newest_python()}
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=2400
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"software   python {NEWEST}." in done.stdout and len(metrics(tmp_path / "run")) == 2
    assert len(metrics(tmp_path / "dist" / "run")) == 2


def test_the_image_has_the_torch_of_the_launch_scripts() -> None:
    (pinned,) = re.findall(r"torch==[\d.]+", (ROOT / "launch" / "env.sh").read_text())
    assert f" {pinned} " in (ROOT / "launch" / "Dockerfile").read_text()
