"""What `export --push_to_hub` sends, to a hub of our own on this machine; and what refusals say."""

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants, hf_api

from wandistiller.hub import push
from wandistiller.problems import ConfigError


class Hub(BaseHTTPRequestHandler):
    """Answers as https://huggingface.co does to the making of a repository and to a commit of small files."""

    token = "hf_right"
    seen: list[tuple[str, dict]] = []
    files: dict[str, bytes] = {}

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        if self.headers.get("Authorization") != f"Bearer {self.token}":
            return self._answer(401, {"error": "Invalid username or password."})
        if self.path == "/api/repos/create":
            self.seen.append((self.path, json.loads(body)))
            return self._answer(200, {"url": f"http://{self.headers['Host']}/org/student", "name": "org/student"})
        if self.path == "/api/validate-yaml":  # the card's front matter
            return self._answer(200, {"errors": [], "warnings": []})
        if "/preupload/" in self.path:
            names = [file["path"] for file in json.loads(body)["files"]]
            told = [{"path": n, "uploadMode": "regular", "shouldIgnore": False, "oid": None} for n in names]
            return self._answer(200, {"files": told})
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        return self._answer(200, {"success": True, "commitOid": "c" * 40, "commitUrl": f"http://{self.headers['Host']}/org/student"})

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
    assert hub.files == {str(f.relative_to(student)): f.read_bytes() for f in student.rglob("*") if f.is_file()}
    made = hub.seen[0][1]
    assert (made["organization"], made["name"], made["visibility"]) == ("org", "student", "private")


def test_files_arrive_under_their_names(hub: type[Hub], tmp_path: Path) -> None:
    (tmp_path / "w_high_noise.safetensors").write_bytes(b"weights")
    push([tmp_path / "w_high_noise.safetensors"], "org/student", private=False)
    assert hub.files == {"w_high_noise.safetensors": b"weights"}


def test_a_token_that_may_not_is_one_message(hub: type[Hub], student: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(ConfigError, match=r"--push_to_hub org/student: the hub refuses: .*HF_TOKEN") as found:
        push([student], "org/student", private=False)
    assert str(student) in str(found.value) and "hf_wrong" not in str(found.value)


def test_a_name_that_cannot_be_is_one_message(hub: type[Hub], student: Path) -> None:
    with pytest.raises(ConfigError, match="--push_to_hub a/b/c: "):
        push([student], "a/b/c", private=False)


def test_a_hub_out_of_reach_is_one_message(hub: type[Hub], student: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (constants, hf_api):
        monkeypatch.setattr(module, "ENDPOINT", "http://127.0.0.1:9", raising=False)
    with pytest.raises(ConfigError, match="give the same command again once the hub can be reached"):
        push([student], "org/student", private=False)
