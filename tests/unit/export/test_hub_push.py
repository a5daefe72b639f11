"""Uploads of `export --push_to_hub` to a hub on this machine, and the messages of refusals."""

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from diffusers import WanTransformer3DModel
from huggingface_hub import constants, hf_api

from wandistiller.cli.main import main
from wandistiller.export.hub import check, push
from wandistiller.utils.errors import ConfigError


class Hub(BaseHTTPRequestHandler):
    """Behaves as https://huggingface.co when a repository is made and small files are committed."""

    token = "hf_right"
    repositories: list[dict] = []
    files: dict[str, bytes] = {}

    def do_GET(self) -> None:
        """Respond to /api/whoami-v2, and list the files of a repository."""
        listed = [{"type": "file", "path": name, "size": 0, "oid": "a" * 40} for name in self.files]
        self._respond(listed if "/tree/" in self.path else {"name": "me"})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        address = f"http://{self.headers['Host']}/org/student"
        if self.path == "/api/repos/create":
            self.repositories.append(json.loads(body))
            self._respond({"url": address, "name": "org/student"})
        elif self.path == "/api/validate-yaml":  # the card's front matter
            self._respond({"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            mode = {"uploadMode": "regular", "shouldIgnore": False, "oid": None}
            self._respond({"files": [{"path": f["path"], **mode} for f in json.loads(body)["files"]]})
        else:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                elif line["key"] == "deletedFile":
                    del self.files[line["value"]["path"]]
            self._respond({"success": True, "commitOid": "c" * 40, "commitUrl": address})

    def _respond(self, value: dict | list) -> None:
        code = 200
        if self.headers.get("Authorization") != f"Bearer {self.token}":
            code, value = 401, {"error": "Invalid username or password."}
        text = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    Hub.repositories, Hub.files = [], {}
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
    """A folder with the file names of an export."""
    (tmp_path / "student" / "vae").mkdir(parents=True)
    for name in ("README.md", "model_index.json", "vae/config.json"):
        (tmp_path / "student" / name).write_text(name)
    return tmp_path / "student"


def test_a_folder_arrives_whole_in_a_repository_that_is_made_for_it(hub: type[Hub], student: Path) -> None:
    address = push([student], "org/student", private=True)
    assert address.endswith("/org/student")
    assert hub.files == {name: name.encode() for name in ("README.md", "model_index.json", "vae/config.json")}
    (made,) = hub.repositories
    assert (made["organization"], made["name"], made["visibility"]) == ("org", "student", "private")


def test_files_arrive_under_their_names(hub: type[Hub], tmp_path: Path) -> None:
    (tmp_path / "w_high_noise.safetensors").write_bytes(b"weights")
    push([tmp_path / "w_high_noise.safetensors"], "org/student", private=False)
    assert hub.files == {"w_high_noise.safetensors": b"weights"}


def network(folder: Path, value: float, shard: str) -> Path:
    """Write a pipeline's folder with a small transformer, all of whose weights are `value`."""
    sizes = {"num_attention_heads": 2, "attention_head_dim": 12, "num_layers": 1, "ffn_dim": 32}
    sizes |= {"text_dim": 16, "freq_dim": 16, "in_channels": 4, "out_channels": 4}
    model = WanTransformer3DModel(**sizes)
    for parameter in model.parameters():
        parameter.data.fill_(value)
    model.save_pretrained(folder / "transformer", max_shard_size=shard)
    return folder


@pytest.mark.parametrize("shards", [("10KB", "1GB"), ("1GB", "10KB"), ("10KB", "20KB")])
def test_diffusers_loads_what_the_last_push_wrote_and_other_weights_stay(
    hub: type[Hub], shards: tuple[str, str], tmp_path: Path
) -> None:
    hub.files["transformer_8bit.safetensors"] = hub.files["transformer/notes.json"] = b"another's"
    for number, shard in enumerate(shards, 1):
        pushed = network(tmp_path / f"{number}", number, shard)
        push([pushed], "org/student", private=False)
    own = {f"transformer/{file.name}" for file in (pushed / "transformer").iterdir()}
    assert hub.files.keys() == own | {"transformer_8bit.safetensors", "transformer/notes.json"}
    for name, content in hub.files.items():
        (tmp_path / "hub" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "hub" / name).write_bytes(content)
    loaded = WanTransformer3DModel.from_pretrained(tmp_path / "hub", subfolder="transformer")
    assert all((parameter == 2.0).all() for parameter in loaded.parameters())


def test_a_token_without_permission_is_one_message(
    hub: type[Hub], student: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(ConfigError, match="--push_to_hub org/student: the hub refuses: .*HF_TOKEN") as caught:
        push([student], "org/student", private=False)
    assert str(student) in str(caught.value) and "hf_wrong" not in str(caught.value)


@pytest.fixture
def unreachable(hub: type[Hub], monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (constants, hf_api):
        monkeypatch.setattr(module, "ENDPOINT", "http://127.0.0.1:9", raising=False)


@pytest.mark.usefixtures("unreachable")
def test_a_failed_upload_names_the_commands_that_upload_the_export_later(
    student: Path, tmp_path: Path
) -> None:
    (tmp_path / "my w.safetensors").write_bytes(b"weights")
    with pytest.raises(ConfigError) as caught:
        push([tmp_path / "my w.safetensors", student], "org/student", private=True)
    assert (
        f"; once the hub can be reached, `hf upload --private org/student '{tmp_path}/my w.safetensors'` and "
        f"`hf upload --private org/student {student}` uploads it as it is."
    ) in str(caught.value)


def test_a_name_without_an_owner_gets_the_token_s_owner(hub: type[Hub]) -> None:
    assert (check("student"), check("org/student")) == ("me/student", "org/student")
    assert hub.repositories == []  # nothing is made yet


@pytest.mark.parametrize(
    ("name", "token", "message"),
    [
        ("a/b/c", "hf_right", "--push_to_hub a/b/c: "),
        ("org/student", "", "there is no token for the hub. Set HF_TOKEN"),
        ("org/student", "hf_wrong", "the hub refuses: "),
    ],
)
@pytest.mark.usefixtures("hub", "quiet_logging")
def test_name_and_token_are_tried_before_anything_is_exported(
    name: str, token: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    words = f"export --checkpoint {tmp_path}/run --output {tmp_path}/s --push_to_hub {name}"
    assert main(words.split()) == 2  # there is no run either, which is not even looked for
    error = capsys.readouterr().err
    assert message in error and error.count("error: ") == 1 and "no checkpoint there" not in error
