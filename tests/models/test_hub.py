"""Hub ids, against a stand-in for the hub: what is fetched, kept, gone on with, and refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.hub import COMMIT, hub
from helpers.models import write_model

from lanternpp.errors import InputError
from lanternpp.models.hub import HubId, choose, hub_id

SCRIPT = "import sys; from lanternpp.cli import main; main(sys.argv[1:])"


@pytest.fixture
def shelf(tmp_path: Path) -> Path:
    """A repository with our tiny model, and things beside it that nobody should fetch."""
    folder = write_model(tmp_path / "hub" / "lamp" / "tiny")
    (folder / "training_state.onnx").write_bytes(b"0" * 10_000)
    (folder / "target" / "old.pt").write_bytes(b"0" * 10_000)
    return tmp_path / "hub"


def lanternpp(tmp_path: Path, address: str, *args: object, **more: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
    env |= {"XDG_CACHE_HOME": str(tmp_path / "cache"), "NO_PROXY": "127.0.0.1"} | more
    command = [sys.executable, "-c", SCRIPT, *map(str, args)]
    return subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=400)


def test_a_model_is_fetched_once_and_drawn_without_a_network_after(shelf, tmp_path):
    requested = ("generate", "a red tulip", "--model", "lamp/tiny", "--json", "-o", "a.png")
    with hub(shelf) as server:
        first = lanternpp(tmp_path, server.address, *requested)
        assert first.returncode == 0, first.stderr
        got = {path.split("/resolve/")[1] for verb, path, _ in server.requested if "/resolve/" in path}
        assert f"{COMMIT}/target/model.safetensors" in got and f"{COMMIT}/defaults.json" in got
        assert not any(name.endswith((".onnx", ".pt")) for name in got)
        address = server.address
    again = lanternpp(tmp_path, address, *requested)  # nobody answers there now
    assert again.returncode == 0, again.stderr
    offline = lanternpp(tmp_path, address, *requested, HF_HUB_OFFLINE="1")
    reported = [json.loads(run.stdout) for run in (first, again, offline)]
    assert (
        reported[0]["accepted_per_pass"]
        == reported[1]["accepted_per_pass"]
        == reported[2]["accepted_per_pass"]
    )
    assert reported[0]["model"] == "lamp/tiny"


def test_a_line_that_goes_dead_is_taken_up_where_it_stopped(shelf, tmp_path):
    large = shelf / "lamp" / "tiny" / "large.safetensors"
    large.write_bytes(bytes(24 << 20))  # more than the hub's library writes at a time
    requested = ("generate", "a red tulip", "--model", f"lamp/tiny@{COMMIT}", "-o", "a.png")
    with hub(shelf) as server:
        server.cut = ("large.safetensors", 15 << 20, 1)
        whole = lanternpp(tmp_path, server.address, *requested)
        assert whole.returncode == 0 and whole.stderr == ""
        spans = [span for verb, path, span in server.requested if verb == "GET" and path.endswith(large.name)]
        assert len(spans) == 2 and int(spans[1].removeprefix("bytes=").split("-")[0]) >= 10 << 20


def test_a_fetch_that_fails_keeps_the_files_it_has(shelf, tmp_path):
    requested = ("generate", "a red tulip", "--model", "lamp/tiny", "-o", "a.png")
    with hub(shelf) as server:
        server.cut = ("model.safetensors", 0, 100)
        broken = lanternpp(tmp_path, server.address, *requested, HF_HUB_DOWNLOAD_TIMEOUT="1")
        assert broken.returncode == 2 and "run it again" in broken.stderr and broken.stderr.count("\n") == 1
        assert not (tmp_path / "a.png").exists()
        server.cut = None
        server.requested.clear()
        assert lanternpp(tmp_path, server.address, *requested).returncode == 0
        got = [path for verb, path, _ in server.requested if verb == "GET" and "/resolve/" in path]
        assert got and all(path.endswith("model.safetensors") for path in got)


@pytest.mark.parametrize(
    ("model", "named"),
    [("lamp/absent", "lamp/absent"), ("lamp/tiny@v9", "v9"), ("lamp/tiny/other.pt", "other.pt")],
)
def test_what_the_hub_does_not_have_is_one_line(shelf, tmp_path, model, named):
    with hub(shelf) as server:
        outcome = lanternpp(tmp_path, server.address, "generate", "a tulip", "--model", model)
    assert outcome.returncode == 2 and outcome.stderr.count("\n") == 1 and named in outcome.stderr


def test_without_a_network_and_without_a_copy_it_says_so(tmp_path):
    outcome = lanternpp(tmp_path, "http://127.0.0.1:9", "generate", "a tulip", "--model", "lamp/tiny")
    assert outcome.returncode == 2 and outcome.stderr.count("\n") == 1
    assert "lamp/tiny is not on this machine" in outcome.stderr


def test_ids_are_told_from_paths():
    assert hub_id("a/b") == HubId("a/b") and str(hub_id("a/b@v1")) == "a/b@v1"
    assert hub_id("a/b/c/d.pt@main") == HubId("a/b", "c/d.pt", "main")
    assert all(hub_id(text) is None for text in ("a", "/a/b", "../a", "a/..", "a b/c", "a/b@", ""))


def test_weights_of_one_format_come_with_what_stands_beside_them():
    files = ["config.json", "model.safetensors", "pytorch_model.bin", "vae/config.json", "picture.png"]
    assert choose(HubId("a/b"), files) == ["model.safetensors", "config.json", "vae/config.json"]
    assert choose(HubId("a/b"), ["x.pt", "readme.md"]) == ["x.pt"]
    shards = ["w-1.bin", "w-2.bin", "w.bin.index.json"]
    assert choose(HubId("a/b"), shards) == ["w-1.bin", "w-2.bin", "w.bin.index.json"]
    assert choose(HubId("a/b", "sub/x.pt"), ["sub/x.pt", "sub/c.json", "y.pt", "d.json"]) == [
        "sub/x.pt",
        "sub/c.json",
    ]
    both = ["t2i_XL.pt", "vq_ds16_c2i.pt", "vq_ds16_t2i.pt", "sub/vq_t2i.pt"]
    assert choose(HubId("a/b", "t2i_XL.pt"), both) == ["t2i_XL.pt", "vq_ds16_t2i.pt"]
    assert choose(HubId("a/b"), [both[0], both[2]]) == [both[0], both[2]]
    assert choose(HubId("a/b", both[1]), both) == [both[1]]
    assert choose(HubId("a/b"), ["m.safetensors", "vqgan.ckpt"]) == ["m.safetensors", "vqgan.ckpt"]
    with pytest.raises(InputError, match=r"name one: a/b/t2i_XL\.pt"):
        choose(HubId("a/b"), ["c2i_B.pt", *both][::-1])
    with pytest.raises(InputError, match=r"name one: a/b/x\.pt"):
        choose(HubId("a/b"), ["x.pt", "y.pt"])
    with pytest.raises(InputError, match="no weights"):
        choose(HubId("a/b"), ["readme.md"])
