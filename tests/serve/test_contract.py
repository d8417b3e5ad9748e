"""Requests generated from the OpenAPI document: no 5xx, and no answer that the document lacks."""

from __future__ import annotations

import pytest
from helpers.served import AUTHORIZED, IMAGES, KEY, batcher_of

from lanternpp.serve.app import create_app
from lanternpp.serve.config import EDITS, ServerConfig

# A prompt without a word that the model knows follows the schema, and so do dials that a method does not read.
ENDPOINTS = dict.fromkeys(("/v1/models", "/v1/models/{model}", "/healthz", "/metrics"), "GET") | {
    IMAGES: "POST",
    EDITS: "POST",
}
ACCEPTED = ["2xx", 400, 404, 504]
CONFIG = {"checks": {"positive_data_acceptance": {"expected-statuses": ACCEPTED}}}


@pytest.fixture(scope="module")
def document(pipe):
    """The document of an app in this process, read by what takes a second to import."""
    import schemathesis
    from schemathesis.config import SchemathesisConfig

    with batcher_of(pipe, ServerConfig("ar", keys=[KEY]), slots=2, page=False) as batcher:
        app = create_app(batcher)
        config = SchemathesisConfig.from_dict(CONFIG)
        yield schemathesis.openapi.from_asgi("/openapi.json", app, config=config, headers=AUTHORIZED)


@pytest.mark.parametrize(("path", "method"), ENDPOINTS.items())
@pytest.mark.parametrize("mode", ["positive", "negative"])
def test_generated_requests(document, path, method, mode):
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis.errors import Unsatisfiable
    from schemathesis import GenerationMode
    from schemathesis.checks import CHECKS

    operation = document[path][method]

    @settings(
        max_examples=20,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=GenerationMode(mode)))
    def requests(case):
        case.call_and_validate(checks=CHECKS.get_all(), headers=AUTHORIZED)

    try:
        requests()
    except Unsatisfiable:
        assert mode == "negative" and method == "GET"  # nothing that could be wrong


def test_the_document_has_every_status(document):
    paths = document.raw_schema["paths"]
    assert set(paths) == set(ENDPOINTS)
    responses = paths[IMAGES]["post"]["responses"]
    assert {"200", "400", "401", "404", "413", "429", "503", "504"} <= responses.keys()
    assert "422" not in responses
    assert "text/event-stream" in responses["200"]["content"]
