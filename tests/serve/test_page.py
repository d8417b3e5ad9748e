"""The page's setup for a model, and its files, without a browser."""

from __future__ import annotations

import re
from pathlib import Path

from helpers.latents import write_diffusion
from helpers.models import write_model
from helpers.served import AUTHORIZED, KEY, client_of, load_tiny

from lanternpp.api.pipeline import Pipeline
from lanternpp.serve.config import ServerConfig
from lanternpp.serve.page import FILES, PAGE_DIALS, methods, setup
from lanternpp.serve.schemas import ImagesRequest
from lanternpp.trees import build_tree


def test_a_method_shows_the_dials_that_it_reads_at_its_own_values(pipe: Pipeline) -> None:
    shown = setup(pipe, ServerConfig())["methods"]
    dials = {"window", "coupling", "init", "alternatives", "window_rows", "verify", "cfg", "temperature"}
    assert set(shown["jacobi"]["dials"]) == dials
    assert (shown["jacobi"]["dials"]["verify"], shown["eagle2"]["dials"]["verify"]) == ("block", "token")
    assert shown["lantern++"]["dials"]["neighbours"] == 8
    assert shown["lantern++"]["dials"]["cfg"] == 2.0
    assert shown["lantern-jacobi"]["limits"] == {
        "neighbours": (1, 31),
        "alternatives": (0, 16),
        "window_rows": (1, 4),
    }
    ends = {name: each["limits"].get("delta") for name, each in shown.items() if "delta" in each["dials"]}
    assert ends == {"lantern": (0, 1), "lantern-static": (0, 1), "cool": (0.01, 3)}
    assert all(ImagesRequest.model_fields.keys() >= {dial.name} for dial in PAGE_DIALS)


def test_the_rule_and_chains_can_be_chosen_where_the_model_has_a_diffusion_head(tmp_path: Path) -> None:
    shown = setup(load_tiny(write_diffusion(tmp_path)), ServerConfig())
    assert shown["methods"]["eagle"]["dials"]["accept"] == "exact"
    assert shown["methods"]["eagle"]["limits"] == {"temperature": (0.05, 2)}
    choices = {row["name"]: row["choices"] for row in shown["dials"]}
    assert choices["accept"] == ("exact", "cspd")
    assert choices["tree"] and all(build_tree(tree).chain for tree in choices["tree"])


def test_the_page_has_the_options_of_the_server(pipe: Pipeline) -> None:
    config = ServerConfig(overrides={"top_k": 5, "lam": 4.0, "tree": "[[0],[0,0]]"})
    shown = setup(pipe, config)
    mine = shown["methods"]["lantern++"]
    assert (shown["method"], mine["sampling"]["top_k"], mine["dials"]["lam"]) == ("lantern++", 5, 4.0)
    assert mine["dials"]["tree"] is None, "a tree without a name is the method's own"
    assert setup(pipe, ServerConfig("ar"))["method"] == "lantern++", (
        "plain decoding against itself is no race"
    )


def test_a_method_whose_network_is_missing_is_not_offered(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "bare")
    for part in (folder / "drafter").iterdir():
        part.unlink()
    (folder / "drafter").rmdir()
    offered = methods(load_tiny(folder), ServerConfig())
    assert "eagle" not in offered and "ar" not in offered
    assert {"parallel", "jacobi", "independent"} <= set(offered)


def test_the_page_hides_no_route_and_runs_only_its_own_scripts(pipe: Pipeline) -> None:
    with client_of(pipe, page=True) as http:
        for path, (_, kind) in FILES.items():
            answer = http.get(path)
            assert answer.status_code == 200 and answer.headers["content-type"].startswith(kind)
            policy = answer.headers["content-security-policy"]
            assert "unsafe" not in policy and "default-src 'none'" in policy
            assert not re.search(r"https?://(?!www\.w3\.org)|\son\w+=|style=|innerHTML", answer.text), path
            assert http.post(path).status_code == 405
        assert http.get("/").text.startswith("<!doctype html>")
        assert http.get("/v1/models").json()["object"] == "list"
        assert set(http.get("/openapi.json").json()["paths"]) & {"/", "/page/setup"} == set()
        for path in ("/page", "/page/", "/page/__init__.py", "/page/..%2fapp.py", "/docs"):
            assert http.get(path).status_code == 404, path


def test_with_keys_the_page_needs_none_but_its_setup_does(pipe: Pipeline) -> None:
    with client_of(pipe, ServerConfig(keys=[KEY]), page=True) as http:
        assert {http.get(path).status_code for path in FILES} == {200}
        assert http.get("/page/setup").status_code == 401
        assert http.get("/page/setup", headers=AUTHORIZED).json()["model"] == pipe.name


def test_without_the_page_its_paths_are_not_found(pipe: Pipeline) -> None:
    with client_of(pipe) as http:
        assert {http.get(path).status_code for path in (*FILES, "/page/setup")} == {404}
