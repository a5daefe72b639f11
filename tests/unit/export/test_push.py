"""What `export --push_to_hub` sends, to a hub of our own on this machine; and what refusals say."""

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants, hf_api

from wandistiller.cli.main import main
from wandistiller.export.hub import check, push
from wandistiller.utils.errors import ConfigError


class Hub(BaseHTTPRequestHandler):
    """Answers as https://huggingface.co does to the making of a repository and to a commit of small files."""

    token = "hf_right"
    seen: list[tuple[str, dict]] = []
    files: dict[str, bytes] = {}

    def do_GET(self) -> None:
        """Of /api/whoami-v2."""
        right = self.headers.get("Authorization") == f"Bearer {self.token}"
        return self._answer(
            *(200, {"name": "me"}) if right else (401, {"error": "Invalid username or password."})
        )

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        if self.headers.get("Authorization") != f"Bearer {self.token}":
            return self._answer(401, {"error": "Invalid username or password."})
        if self.path == "/api/repos/create":
            self.seen.append((self.path, json.loads(body)))
            return self._answer(
                200, {"url": f"http://{self.headers['Host']}/org/student", "name": "org/student"}
            )
        if self.path == "/api/validate-yaml":  # the card's front matter
            return self._answer(200, {"errors": [], "warnings": []})
        if "/preupload/" in self.path:
            names = [file["path"] for file in json.loads(body)["files"]]
            told = [{"path": n, "uploadMode": "regular", "shouldIgnore": False, "oid": None} for n in names]
            return self._answer(200, {"files": told})
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        return self._answer(
            200,
            {
                "success": True,
                "commitOid": "c" * 40,
                "commitUrl": f"http://{self.headers['Host']}/org/student",
            },
        )

    def _answer(self, code: int, value: dict) -> None:
        text = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    Hub.seen, Hub.files = [], {}
    server = HTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    for module in (constants, hf_api):
        monkeypatch.setattr(module, "ENDPOINT", address, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", address)
    monkeypatch.setenv("HF_TOKEN", Hub.token)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    yield Hub
    server.shutdown()


@pytest.fixture
def student(tmp_path: Path) -> Path:
    """A folder as an export leaves it, in names."""
    for name, text in (("README.md", "# card"), ("model_index.json", "{}"), ("vae/config.json", '{"a": 1}')):
        (tmp_path / "student" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "student" / name).write_text(text)
    return tmp_path / "student"


def test_a_folder_arrives_whole_in_a_repository_that_is_made_for_it(hub: type[Hub], student: Path) -> None:
    address = push([student], "org/student", private=True)
    assert address.endswith("/org/student")
    assert hub.files == {
        str(f.relative_to(student)): f.read_bytes() for f in student.rglob("*") if f.is_file()
    }
    made = hub.seen[0][1]
    assert (made["organization"], made["name"], made["visibility"]) == ("org", "student", "private")


def test_files_arrive_under_their_names(hub: type[Hub], tmp_path: Path) -> None:
    (tmp_path / "w_high_noise.safetensors").write_bytes(b"weights")
    push([tmp_path / "w_high_noise.safetensors"], "org/student", private=False)
    assert hub.files == {"w_high_noise.safetensors": b"weights"}


def test_a_token_that_may_not_is_one_message(
    hub: type[Hub], student: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(ConfigError, match=r"--push_to_hub org/student: the hub refuses: .*HF_TOKEN") as found:
        push([student], "org/student", private=False)
    assert str(student) in str(found.value) and "hf_wrong" not in str(found.value)


def test_a_name_that_cannot_be_is_one_message(hub: type[Hub], student: Path) -> None:
    with pytest.raises(ConfigError, match="--push_to_hub a/b/c: "):
        push([student], "a/b/c", private=False)


@pytest.fixture
def unreachable(hub: type[Hub], monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (constants, hf_api):
        monkeypatch.setattr(module, "ENDPOINT", "http://127.0.0.1:9", raising=False)


@pytest.mark.usefixtures("unreachable")
def test_what_did_not_arrive_is_uploaded_later_as_it_is(student: Path, tmp_path: Path) -> None:
    (tmp_path / "w.safetensors").write_bytes(b"weights")
    with pytest.raises(ConfigError) as found:
        push([tmp_path / "w.safetensors", student], "org/student", private=True)
    assert (
        f"; once the hub can be reached, `hf upload --private org/student {tmp_path}/w.safetensors` and "
        f"`hf upload --private org/student {student}` uploads it as it is."
    ) in str(found.value)


def test_the_owner_of_a_name_without_one_is_asked_for(hub: type[Hub]) -> None:
    assert (check("student"), check("org/student")) == ("me/student", "org/student")
    assert hub.seen == []  # nothing is made yet


@pytest.mark.parametrize(
    ("name", "token", "said"),
    [
        ("a/b/c", "hf_right", "--push_to_hub a/b/c: "),
        ("org/student", "", "there is no token for the hub. Set HF_TOKEN"),
        ("org/student", "hf_wrong", "the hub refuses: "),
    ],
)
@pytest.mark.usefixtures("hub", "quiet_logging")
def test_name_and_token_are_tried_before_anything_is_exported(
    name: str,
    token: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    words = [
        "export",
        "--checkpoint",
        str(tmp_path / "run"),
        "--output",
        str(tmp_path / "s"),
        "--push_to_hub",
        name,
    ]
    assert main(words) == 2  # there is no run either, which is not even looked at
    error = capsys.readouterr().err
    assert said in error and error.count("error: ") == 1 and "no checkpoint there" not in error


@pytest.mark.usefixtures("unreachable")
def test_a_hub_out_of_reach_is_known_before_the_export() -> None:
    with pytest.raises(
        ConfigError, match="Nothing was exported; once the hub can be reached, give the same command again"
    ):
        check("org/student")
