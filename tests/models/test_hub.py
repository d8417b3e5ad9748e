"""Hub ids, with a stand-in for the hub: what is downloaded, kept, resumed and rejected."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.hub import COMMIT, Outcome, hub, run_with_hub
from helpers.models import write_model
from helpers.refusals import rejects

from lanternpp.models.hub import HubId, choose, fetch, hub_id

DRAW = ["generate", "a red tulip", "--model", "someone/tiny", "--json", "-o", "a.png"]
ABSENT = {"someone/absent": "someone/absent", "someone/tiny@v9": "v9", "someone/tiny/other.pt": "other.pt"}


def repositories(place: Path) -> Path:
    """A folder for the hub: our tiny model, and files beside it that should not be downloaded."""
    folder = write_model(place / "hub" / "someone" / "tiny")
    (folder / "training_state.onnx").write_bytes(b"0" * 10_000)
    (folder / "target" / "old.pt").write_bytes(b"0" * 10_000)
    return place / "hub"


def bench(repositories: Path, prompts: str, out: str) -> list[str]:
    quick = ["--methods", "ar", "-n", "1", "--no-plots", "--no-measure-tv", "--json"]
    where = ["--model", str(repositories / "someone/tiny"), "--prompts", f"someone/words/{prompts}"]
    return ["bench", *where, *quick, "-o", out]


@pytest.fixture(scope="module")
def downloaded(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[dict[str, Outcome], list[tuple[str, str, str]]]:
    """How commands ended with the hub, in another process without it, and offline; and what the hub was asked for."""
    place = tmp_path_factory.mktemp("downloaded")
    there = repositories(place)
    (there / "someone/words").mkdir()
    (there / "someone/words/PartiPrompts.tsv").write_text("Prompt\tCategory\na red tulip\tPlants\n")
    # more than the hub's library writes at a time
    (there / "someone/tiny/large.safetensors").write_bytes(bytes(24 << 20))
    asked = {"first": DRAW, "commit": [*DRAW[:3], f"someone/tiny@{COMMIT}", *DRAW[4:]]}
    asked |= {name: ["generate", "a tulip", "--model", name] for name in ABSENT}
    asked |= {"prompts": bench(there, "PartiPrompts.tsv", "a"), "no prompts": bench(there, "absent.tsv", "c")}
    later = {"again": DRAW, "prompts again": bench(there, "PartiPrompts.tsv", "b")}
    later["gone"] = ["generate", "a tulip", "--model", "someone/gone"]
    with hub(there) as server:
        server.cut = ("large.safetensors", 15 << 20, 1)
        found = run_with_hub(place, server.address, *asked.values())
        address = server.address
    found += run_with_hub(place, address, *later.values())  # the hub is closed now
    found += run_with_hub(place, address, DRAW, HF_HUB_OFFLINE="1")
    assert not (place / "c").exists()
    return dict(zip([*asked, *later, "offline"], found, strict=True)), server.requested


def test_a_model_is_downloaded_once_and_then_drawn_without_a_network(downloaded) -> None:
    outcomes, requested = downloaded
    got = {path.split("/resolve/")[1] for _, path, _ in requested if "/someone/tiny/resolve/" in path}
    assert f"{COMMIT}/target/model.safetensors" in got and f"{COMMIT}/defaults.json" in got
    assert not any(name.endswith((".onnx", "old.pt")) for name in got)
    for name in ("first", "commit", "again", "offline"):
        code, out, err = outcomes[name]
        assert (code, err) == (0, ""), name
        drawn = json.loads(out)
        assert drawn["accepted_per_pass"] == json.loads(outcomes["first"][1])["accepted_per_pass"]
        assert drawn["model"] == ("someone/tiny" if name != "commit" else f"someone/tiny@{COMMIT}")


def test_an_interrupted_download_is_resumed(downloaded) -> None:
    spans = [
        span for verb, path, span in downloaded[1] if verb == "GET" and path.endswith("large.safetensors")
    ]
    assert len(spans) == 2 and int(spans[1].removeprefix("bytes=").split("-")[0]) >= 10 << 20


def test_a_failed_download_keeps_complete_files(tmp_path: Path) -> None:
    with hub(repositories(tmp_path)) as server:
        server.cut = ("model.safetensors", 0, 100)
        ((code, _, err),) = run_with_hub(tmp_path, server.address, DRAW, HF_HUB_DOWNLOAD_TIMEOUT="60")
        assert code == 2 and "run it again" in err and err.count("\n") == 1
        assert not (tmp_path / "a.png").exists()
        server.cut = None
        server.requested.clear()
        assert run_with_hub(tmp_path, server.address, DRAW)[0][0] == 0
        got = [path for verb, path, _ in server.requested if verb == "GET" and "/resolve/" in path]
        assert got and all(path.endswith("model.safetensors") for path in got)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        *ABSENT.items(),
        ("gone", "someone/gone is not on this machine"),  # without a network and without a copy
        ("no prompts", "someone/words/absent.tsv are not here, nor"),
    ],
)
def test_what_cannot_be_downloaded_is_one_line(name: str, said: str, downloaded) -> None:
    code, _, err = downloaded[0][name]
    assert code == 2 and err.count("\n") == 1 and said in err


def test_prompts_are_downloaded_from_a_dataset_and_then_used_without_a_network(downloaded) -> None:
    for name in ("prompts", "prompts again"):
        code, out, err = downloaded[0][name]
        assert code == 0, err
        assert json.loads(out)["prompts"] == ["a red tulip"]


def test_hub_ids_and_paths():
    assert hub_id("a/b") == HubId("a/b") and str(hub_id("a/b@v1")) == "a/b@v1"
    assert hub_id("a/b/c/d.pt@main") == HubId("a/b", "c/d.pt", "main")
    assert all(hub_id(text) is None for text in ("a", "/a/b", "../a", "a/..", "a b/c", "a/b@", ""))


def test_files_are_chosen_by_one_format_of_weights():
    files = ["config.json", "model.safetensors", "pytorch_model.bin", "vae/config.json", "picture.png"]
    assert choose(HubId("a/b"), files) == ["model.safetensors", "config.json", "vae/config.json"]
    assert choose(HubId("a/b"), ["x.pt", "readme.md"]) == ["x.pt"]
    assert choose(HubId("a/b"), ["model.ckpt", "config.yaml"]) == ["model.ckpt", "config.yaml"]
    drafter = ["config.json", "optimizer.bin", "pytorch_model.bin", "scheduler.bin", "training_args.bin"]
    assert choose(HubId("a/b"), drafter) == ["pytorch_model.bin", "config.json"]
    shards = ["w-1.bin", "w-2.bin", "w.bin.index.json"]
    assert choose(HubId("a/b"), shards) == ["w-1.bin", "w-2.bin", "w.bin.index.json"]
    apart = ["sub/x.pt", "sub/c.json", "y.pt", "d.json"]
    assert choose(HubId("a/b", "sub/x.pt"), apart) == apart[:2]
    both = ["t2i_XL.pt", "vq_ds16_c2i.pt", "vq_ds16_t2i.pt", "sub/vq_t2i.pt"]
    assert choose(HubId("a/b", "t2i_XL.pt"), both) == ["t2i_XL.pt", "vq_ds16_t2i.pt"]
    assert choose(HubId("a/b"), [both[0], both[2]]) == [both[0], both[2]]
    assert choose(HubId("a/b", both[1]), both) == [both[1]]
    assert choose(HubId("a/b"), ["m.safetensors", "vqgan.ckpt"]) == ["m.safetensors", "vqgan.ckpt"]
    rejects(r"name one: a/b/t2i_XL\.pt", choose, HubId("a/b"), ["c2i_B.pt", *both][::-1])
    rejects(r"name one: a/b/x\.pt", choose, HubId("a/b"), ["x.pt", "y.pt"])
    rejects("no weights", choose, HubId("a/b"), ["readme.md"])
    rejects("use deepseek-community/Janus-Pro-7B", fetch, HubId("deepseek-ai/Janus-Pro-7B"))
