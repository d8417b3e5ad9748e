"""The OpenAPI document is kept: generated requests find no 5xx, and no answer that it does not tell of."""

from __future__ import annotations

import pytest
import schemathesis
from helpers.served import AUTHORIZED, KEY, batcher_of
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS
from schemathesis.config import SchemathesisConfig

from lanternpp.serve.app import create_app
from lanternpp.serve.config import ServerConfig

# A prompt without a word that the model knows follows the schema, and so do dials that a method does not read.
TAKEN = ["2xx", 400, 404, 504]
CONFIG = {"checks": {"positive_data_acceptance": {"expected-statuses": TAKEN}}}


@pytest.fixture(scope="module")
def document(pipe):
    """The document of an app in this process."""
    with batcher_of(pipe, ServerConfig("ar", keys=[KEY]), slots=2, page=False) as batcher:
        app = create_app(batcher)
        config = SchemathesisConfig.from_dict(CONFIG)
        yield schemathesis.openapi.from_asgi("/openapi.json", app, config=config, headers=AUTHORIZED)


@pytest.mark.parametrize(
    ("path", "method"),
    [
        ("/v1/images/generations", "POST"),
        ("/v1/models", "GET"),
        ("/v1/models/{model}", "GET"),
        ("/healthz", "GET"),
        ("/metrics", "GET"),
    ],
)
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_generated_requests(document, path, method, mode):
    operation = document[path][method]

    @settings(
        max_examples=20,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def requests(case):
        case.call_and_validate(checks=CHECKS.get_all(), headers=AUTHORIZED)

    try:
        requests()
    except Unsatisfiable:
        assert mode is GenerationMode.NEGATIVE and method == "GET"  # nothing that could be wrong


def test_every_check_is_on(document):
    assert {"negative_data_rejection", "ignored_auth", "unsupported_method"} < set(CHECKS.get_all_names())


def test_the_document_tells_of_what_is_answered(document):
    paths = document.raw_schema["paths"]
    assert set(paths) == {
        "/v1/images/generations",
        "/v1/models",
        "/v1/models/{model}",
        "/healthz",
        "/metrics",
    }
    responses = paths["/v1/images/generations"]["post"]["responses"]
    assert {"200", "400", "401", "404", "413", "429", "503", "504"} <= set(
        responses
    ) and "422" not in responses
    assert "text/event-stream" in responses["200"]["content"]
