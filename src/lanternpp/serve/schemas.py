"""The JSON of requests and responses: the OpenAI Images API, and a few fields of our own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, create_model

from lanternpp.api.options import (
    DIALS,
    MAX_SECONDS,
    Dial,
    DraftDials,
    MeasureDials,
    RuleDials,
    SamplingDials,
    names,
)

MAX_SEED = 2**62  # of a picture, as on the command line
Name = Annotated[str, Field(max_length=100)]
# Fields that only OpenAI's models use; none changes a picture.
IGNORED = ("complexity", "input_fidelity", "moderation", "quality", "safety_identifier", "style", "user")


class _RequestFields(BaseModel):
    """A request for pictures. Fields that only OpenAI's models use are accepted and ignored."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True)

    prompt: str = Field(min_length=1, description="What to draw.", examples=["a photo of a red tulip"])
    model: Name | None = Field(None, description="One of /v1/models, or nothing.")
    n: Annotated[int, Field(ge=1, le=10)] | None = Field(
        None, description="Pictures; picture i has seed + i."
    )
    size: Name | None = Field(None, description='"auto", or the size that the model draws.')
    response_format: Literal["b64_json", "url"] | None = Field(
        None, description="url: a data: URL; not with stream."
    )
    output_format: Literal["png", "jpeg", "webp"] | None = None
    output_compression: Annotated[int, Field(ge=0, le=100)] | None = Field(
        None, description="Quality of jpeg and webp; default: 90, and webp without loss."
    )
    stream: bool | None = Field(None, description="Server-sent events, a picture as soon as it is finished.")
    partial_images: Annotated[int, Field(ge=0, le=3)] | None = Field(
        None, description="With stream: so many unfinished pictures, evenly spaced."
    )
    progress: bool | None = Field(
        None,
        description="With stream: while a picture is drawn, its figures and a JPEG of the part that is decided.",
    )
    background: Literal["auto", "opaque"] | None = None

    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = Field(
        None, description="Of the first picture; default: a random one, which the answer has."
    )
    deadline: Annotated[float, Field(gt=0, le=MAX_SECONDS)] | None = Field(
        None, description="Seconds after which pictures that are not finished are given up."
    )
    method: Name | None = Field(None, description="A method by name; default: the server's.")

    def overrides(self) -> dict[str, Any]:
        """Return the values of the dials that the request sets."""
        return {dial.name: value for dial in REQUEST_DIALS if (value := getattr(self, dial.name)) is not None}


def field(dial: Dial) -> Any:
    """Return the type of a dial's field with the dial's limits, and the field's description, for pydantic."""
    kind: Any = Name if dial.kind is str else dial.kind
    return Annotated[kind, dial] | None, Field(None, description=dial.about)


REQUESTED = ("accept", *names(DraftDials, RuleDials, MeasureDials, SamplingDials))
REQUEST_DIALS = tuple(DIALS[name] for name in REQUESTED)
if TYPE_CHECKING:  # type checkers do not see the fields of dials, which are read by their names
    ImagesRequest = _RequestFields
else:
    fields = dict.fromkeys(IGNORED, (Annotated[str, Field(max_length=1000)] | None, None))
    fields |= {dial.name: field(dial) for dial in REQUEST_DIALS}
    ImagesRequest = create_model("ImagesRequest", __base__=_RequestFields, __module__=__name__, **fields)
    ImagesRequest.__doc__ = _RequestFields.__doc__


class Facts(BaseModel):
    """How a picture was drawn: what is needed to draw it again, and its figures."""

    seed: int
    method: str
    batch_size: int = Field(description="Batch size of the engine that drew it.")
    codes: int
    passes: int
    codes_per_pass: float
    accepted_per_pass: list[int]
    seconds: float = Field(description="Seconds that the engine computed while the picture was in it.")
    waited: float = Field(description="Seconds in the queue.")
    tv_cost: float | None = None
    settings: dict[str, Any]


class Picture(BaseModel):
    """One picture of a response."""

    b64_json: str | None = None
    url: str | None = None
    lanternpp: Facts


class InputDetails(BaseModel):
    """What the input consisted of."""

    image_tokens: int = 0
    text_tokens: int


class Usage(BaseModel):
    """Words of the prompt and codes of the pictures."""

    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: InputDetails


class ImagesResponse(BaseModel):
    """The pictures of a request."""

    created: int
    background: Literal["opaque"] = "opaque"
    output_format: Literal["png", "jpeg", "webp"]
    size: str
    data: list[Picture]
    usage: Usage


class ModelCard(BaseModel):
    """A model that requests can name."""

    id: str
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: str = "lanternpp"


class ModelList(BaseModel):
    """All models that requests can name."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class Health(BaseModel):
    """Whether the server takes requests."""

    status: Literal["ok", "draining"]
    running: int
    queued: int


class Fault(BaseModel):
    """What is wrong, in one sentence."""

    message: str
    type: str
    param: str | None
    code: str | None


class Refusal(BaseModel):
    """The body of every answer that is not a success."""

    error: Fault
