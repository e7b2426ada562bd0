"""Folders and repos become files; a small server on this machine stands for the Hub."""

import hashlib
import http.server
import json
import threading
from pathlib import Path

import pytest

from diffusion_core.errors import CheckpointError, MissingFileError
from diffusion_core.hub import find_file, find_weights, snapshot, with_variant

NAME = "diffusion_pytorch_model"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
INDEX = json.dumps(
    {"weight_map": {"a": f"{NAME}-00001-of-00002.safetensors", "b": f"{NAME}-00002-of-00002.safetensors"}}
)
FILES = {
    "model_index.json": "{}",
    "unet/config.json": '{"x": 1}',
    f"unet/{NAME}.safetensors.index.json": INDEX,
    f"unet/{NAME}-00001-of-00002.safetensors": "first",
    f"unet/{NAME}-00002-of-00002.safetensors": "second",
    f"vae/{NAME}.bin": "pickle",
}


class Server(http.server.BaseHTTPRequestHandler):
    requests: list[str] = []  # noqa: RUF012

    def do_HEAD(self):
        self.answer(body=False)

    def do_GET(self):
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        path = self.path.split("?")[0]
        self.requests.append(f"{self.command} {path}")
        if "/me/model" not in path:
            code = "GatedRepo" if "gated" in path else "RepoNotFound"
            return self.send(
                403 if "gated" in path else 404, b"", {"X-Error-Code": code, "X-Error-Message": "no"}, body
            )
        if path.startswith("/api/"):
            listing = {"id": "me/model", "sha": COMMIT, "siblings": [{"rfilename": name} for name in FILES]}
            if "/tree/" in path:
                listing = [
                    {"type": "file", "path": name, "size": len(text), "oid": "0"} for name, text in FILES.items()
                ]
            return self.send(200, json.dumps(listing).encode(), {"Content-Type": "application/json"}, body)
        name = path.split(f"/resolve/{COMMIT}/")[-1].split("/resolve/main/")[-1]
        if name not in FILES:
            return self.send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}, body)
        content = FILES[name].encode()
        etag = hashlib.sha1(content).hexdigest()
        return self.send(200, content, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT}, body)

    def send(self, status: int, content: bytes, headers: dict[str, str], body: bool) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(key, value)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, *args) -> None:
        pass


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The options of a cache of its own, with the Hub's address turned to a local server."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}"
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True, raising=False)
    yield {"cache_dir": tmp_path / "cache"}
    server.shutdown()
    server.server_close()


def test_one_file_of_a_repo_comes_and_stays_in_the_cache(hub):
    path = find_file("me/model", "config.json", subfolder="unet", **hub)
    assert json.loads(path.read_text()) == {"x": 1}
    assert find_file("me/model", "config.json", subfolder="unet", local_files_only=True, **hub) == path
    with pytest.raises(MissingFileError, match=r"me/model/none\.json does not exist"):
        find_file("me/model", "none.json", **hub)


def test_weights_of_a_repo_are_found_by_one_listing(hub):
    found = find_weights("me/model", subfolder="unet", **hub)
    assert [path.read_text() for path in found.files] == ["first", "second"] and found.safetensors
    assert {key: path.read_text() for key, path in (found.weight_map or {}).items()} == {"a": "first", "b": "second"}
    assert find_weights("me/model", subfolder="unet", local_files_only=True, **hub) == found
    assert not find_weights("me/model", subfolder="vae", **hub).safetensors
    with pytest.raises(MissingFileError, match=r"no weights in me/model/unet: looked for .*fp16"):
        find_weights("me/model", subfolder="unet", variant="fp16", **hub)


def test_a_snapshot_has_what_the_patterns_allow(hub):
    folder = snapshot("me/model", allow_patterns=["unet/*"], ignore_patterns="*.safetensors", **hub)
    assert {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} == {
        "unet/config.json", f"unet/{NAME}.safetensors.index.json"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("repo", "message"), [("me/absent", "no such repo.*private.*token"), ("me/gated", "gated: accept its terms")]
)
def test_repos_that_cannot_be_read_say_why(hub, repo, message):
    for call in (
        lambda: find_file(repo, "config.json", **hub),
        lambda: find_weights(repo, **hub),
        lambda: snapshot(repo, **hub),
    ):
        with pytest.raises(CheckpointError, match=message) as caught:
            call()
        assert repo in str(caught.value)


def test_without_a_connection_the_remedy_is_told(tmp_path):
    for call in (find_file, find_weights):
        arguments = ("me/other", "config.json") if call is find_file else ("me/other",)
        with pytest.raises(MissingFileError, match=r"me/other"):
            call(*arguments, cache_dir=tmp_path, local_files_only=True)
    with pytest.raises(CheckpointError, match="Name a local folder, or go online"):
        find_file("me/other", "config.json", cache_dir=tmp_path, local_files_only=True)
    with pytest.raises(CheckpointError, match="me/other"):
        snapshot("me/other", cache_dir=tmp_path, local_files_only=True)


@pytest.mark.parametrize(
    "name", ["./none", "a/b/c", "/abs/none", "~/none-of-this", "", "C:\\models\\x", Path("some") / "where"]
)
def test_a_path_that_is_not_there_is_not_taken_for_a_repo(name):
    with pytest.raises(MissingFileError, match="there is no folder"):
        find_file(name, "config.json")


def test_odd_names_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="nor a valid repo id"):
        find_file("a b?", "config.json")
    (tmp_path / "file").write_text("x")
    with pytest.raises(MissingFileError, match="is a file"):
        find_file(str(tmp_path / "file"), "config.json")


def test_local_folders_are_used_as_they_are(tmp_path):
    (tmp_path / "unet").mkdir()
    (tmp_path / "unet" / "dotless").write_text("x")
    assert snapshot(tmp_path) == snapshot(str(tmp_path)) == tmp_path
    assert find_file(str(tmp_path), "dotless", subfolder="unet").read_text() == "x"
    with pytest.raises(MissingFileError, match=r"no file named config\.json in .*; it holds dotless"):
        find_file(tmp_path, "config.json", subfolder="unet")
    with pytest.raises(MissingFileError, match="that folder does not exist"):
        find_file(tmp_path, "config.json", subfolder="vae")
    # A file without a dot does not confuse the search for a variant.
    with pytest.raises(MissingFileError, match="variant='fp16'"):
        find_weights(tmp_path, subfolder="unet", variant="fp16")


def test_variants_go_before_the_last_part_of_the_name():
    assert with_variant("a.safetensors", "fp16") == "a.fp16.safetensors"
    assert with_variant("a.safetensors.index.json", "fp16") == "a.safetensors.index.fp16.json"
    assert with_variant("dotless", "fp16") == "dotless.fp16"
    assert with_variant("a.bin", None) == "a.bin"
