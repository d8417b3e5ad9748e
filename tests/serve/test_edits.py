"""Editing: pictures that come in a form, drawn in their own shape, and forms that are wrong."""

from __future__ import annotations

import io
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from helpers.families import write_emu35
from helpers.served import app_of, client_of, drawn
from PIL import Image

from lanternpp import Pipeline
from lanternpp.api.results import GREY, unfinished
from lanternpp.serve.config import EDITS, ServerConfig

Form = tuple[str, bytes, str]


@pytest.fixture(scope="module")
def editor(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    """A tiny model that edits."""
    folder = tmp_path_factory.mktemp("editor") / "emu35"
    write_emu35(folder)
    return Pipeline.from_pretrained(folder, device="cpu", dtype="float32", tuned=False)


@pytest.fixture(scope="module")
def server(editor: Pipeline):
    """The address of its server."""
    with app_of(editor, ServerConfig("ar", upload_limit=100_000), slots=4) as (_, address):
        yield address


def noise(width: int, height: int) -> Image.Image:
    """A picture in which no two codes are likely to be the same."""
    return Image.effect_noise((width, height), 120).convert("RGB")


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, format="PNG")
    return file.getvalue()


WIDE, TALL = noise(70, 30), noise(30, 70)


def test_the_openai_client_edits_a_picture_in_its_own_shape(client: openai.OpenAI, editor: Pipeline) -> None:
    fields = {"seed": 5, "cfg": 2.5, "measure_tv": False}
    answer = client.images.edit(image=png(WIDE), prompt="red sea", n=2, extra_body=fields)
    assert answer.size == "96x48" and len(answer.data) == 2
    settings = answer.data[0].lanternpp["settings"]
    expected = editor("red sea", n=2, seed=5, image=WIDE, **settings | {"batch_size": 2})
    for one, picture in zip(answer.data, expected.images, strict=True):
        assert one.lanternpp["settings"]["cfg"] == 2.5
        edited = drawn(one.b64_json)
        assert edited.size == picture.size == (96, 48) and edited.tobytes() == picture.tobytes()
        assert edited.info["shown"] == sha256(WIDE.tobytes()).hexdigest()[:16]
    assert answer.usage.input_tokens_details.image_tokens == 18
    assert answer.usage.output_tokens == 2 * expected.codes.shape[1]
    other = client.images.edit(image=[png(WIDE), png(TALL)], prompt="red sea", extra_body={"seed": 5})
    assert drawn(other.data[0].b64_json).size == (48, 96)  # of the last
    square = client.images.edit(image=png(WIDE), prompt="red sea", size="64x64", extra_body={"seed": 5})
    assert square.size == "64x64"
    strip = client.images.edit(image=png(Image.new("1", (5000, 1))), prompt="red sea")
    assert strip.size == "256x16", "a row of all codes"
    plain = client.images.generate(prompt="red sea", extra_body={"seed": 5})
    assert plain.size == "64x64"
    assert drawn(plain.data[0].b64_json).tobytes() != drawn(square.data[0].b64_json).tobytes()


def test_an_edit_streams(client: openai.OpenAI) -> None:
    with client.images.edit(
        image=png(TALL), prompt="red sea", stream=True, partial_images=1, extra_body={"progress": True}
    ) as events:
        seen = list(events)
    kinds = {event.type for event in seen}
    assert "image_edit.completed" in kinds and all(kind.startswith("image_edit.") for kind in kinds)
    assert seen[-1].size == "48x96" and drawn(seen[-1].b64_json).size == (48, 96)


def test_undecided_codes_are_grey(editor: Pipeline) -> None:
    """Codes that end a row take no room."""
    target = editor.target.shaped(editor.target.depicted("red", [TALL]).shape)
    for decided, left in ((4, [(0, 16)]), (6, [(32, 16), (0, 32)]), (7, [(0, 32)])):
        image = unfinished(target, torch.arange(decided) % 4)
        assert image.size == (48, 96)
        grey = {
            (x, y)
            for x in range(0, 48, 16)
            for y in range(0, 96, 16)
            if image.getpixel((x + 8, y + 8)) == GREY
        }
        assert set(left) <= grey and (0, 0) not in grey, decided
        assert len(grey) == 18 - (decided - decided // 4), decided


PICTURE: Form = ("a.png", png(WIDE), "image/png")
RED = {"prompt": "red sea"}
TRUNCATED, LARGE = PICTURE[1][:400], png(Image.new("1", (70_000, 1000)))
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no picture": ({"data": RED, "files": {"other": PICTURE}}, "an edit needs a picture"),
    "no form": ({"json": RED}, "an edit needs a picture"),
    "text for a picture": ({"data": RED | {"image": "/etc/passwd"}}, "an edit needs a picture"),
    "a broken picture": ({"data": RED, "files": {"image": TRUNCATED}}, "image 1 cannot be read: "),
    "another format": (
        {"data": RED, "files": {"image": b"%!PS-Adobe-3.0 EPSF-3.0\n"}},
        "image 1 cannot be read: ",
    ),
    "too many pixels": ({"data": RED, "files": {"image": LARGE}}, "70000x1000 pixels"),
    "a mask": ({"data": RED, "files": {"image": PICTURE, "mask": PICTURE}}, "mask cannot be a file"),
    "no prompt": ({"files": {"image": PICTURE}}, "'prompt' is missing"),
    "a prompt in a file": ({"files": {"image": PICTURE, "prompt": PICTURE}}, "prompt cannot be a file"),
    "a dial": ({"data": RED | {"cfg": "nan"}, "files": {"image": PICTURE}}, "cfg 'nan' is not valid"),
    "a size": ({"data": RED | {"size": "32x32"}, "files": {"image": PICTURE}}, "use '64x64' or 'auto'"),
    "many pictures": ({"data": RED, "files": [("image[]", PICTURE)] * 12}, "choose a smaller size"),
    "too many pictures": ({"data": RED, "files": [("image[]", b"x")] * 17}, "Too many files"),
    "too many fields": ({"data": {f"a{i}": "1" for i in range(101)}, "files": {"image": b"x"}}, "Too many"),
    "no boundary": ({"content": b"x", "headers": {"content-type": "multipart/form-data"}}, "boundary"),
}
HALF = {"content-type": "multipart/form-data; boundary=x"}
BROKEN = (b"", b"--x", b"--y\r\n\r\n--y--", b"--x\r\nno header\xff\r\n\r\n")
WRONG |= {f"a broken form {form!r}": ({"content": form, "headers": HALF}, "") for form in BROKEN}


@pytest.mark.parametrize("name", WRONG)
def test_every_wrong_edit_has_a_message_in_one_sentence(server: str, name: str) -> None:
    given, said = WRONG[name]
    answer = httpx.post(server + EDITS, timeout=300, **given)
    message = answer.json()["error"]["message"]
    assert answer.status_code == 400 and said in message, message
    assert "\n" not in message and " at 0x" not in message and "Traceback" not in message


def test_a_model_that_draws_from_text_alone_rejects_edits(pipe: Pipeline) -> None:
    with client_of(pipe) as http:
        answer = http.post(EDITS, data=RED, files={"image": PICTURE})
    assert answer.status_code == 400
    assert "tiny draws from text alone; use /v1/images/generations" in answer.text


@pytest.mark.parametrize("announced", [True, False])
def test_uploads_are_limited(server: str, announced: bool) -> None:
    head = b'--x\r\nContent-Disposition: form-data; name="image"; filename="a"\r\n\r\n'
    content = head + b"x" * 110_000
    sent: Any = content if announced else (content[i : i + 1000] for i in range(0, len(content), 1000))
    answer = httpx.post(server + EDITS, content=sent, headers=HALF)
    assert answer.status_code == 413 and "100000 bytes" in answer.text
    assert httpx.post(f"{server}/v1/images/generations", content=b"x" * (1 << 21)).status_code == 413


def test_a_given_size_applies_to_edits(tmp_path: Path) -> None:
    write_emu35(tmp_path / "emu35")
    pipe = Pipeline.from_pretrained(tmp_path / "emu35", device="cpu", dtype="float32", size="32x64")
    assert pipe("red", image=WIDE, method="ar").images[0].size == (32, 64)
