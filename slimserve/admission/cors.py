"""Web pages that may call: CORS for the origins that the operator named."""

from __future__ import annotations

from slimserve.admission.asgi import App
from slimserve.admission.exchange import NOTE_HEADER

# What browsers' clients of OpenAI's and Anthropic's interfaces send.
_CORS_HEADERS = (
    "anthropic-beta anthropic-dangerous-direct-browser-access anthropic-version authorization content-type "
    "openai-beta openai-organization openai-project x-api-key x-request-id x-stainless-arch x-stainless-async "
    "x-stainless-helper-method x-stainless-lang x-stainless-os x-stainless-package-version x-stainless-retry-count "
    "x-stainless-runtime x-stainless-runtime-version x-stainless-timeout"
).split()


def with_cors(app: App, origins: tuple[str, ...]) -> App:
    """The application with CORS for these origins around it."""
    from starlette.middleware.cors import CORSMiddleware

    cors: App = CORSMiddleware(  # type: ignore[assignment]  # its types are starlette's own names for the same
        app,  # type: ignore[arg-type]
        allow_origins=origins,
        allow_methods=("GET", "POST"),
        allow_headers=_CORS_HEADERS,
        expose_headers=(NOTE_HEADER.decode(), "retry-after"),
    )
    return cors
