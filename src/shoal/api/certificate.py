"""The certificate that clients keep when they log in: they compare its fingerprint first."""

from __future__ import annotations

from typing import Any

from litestar import Controller, Request, get

from shoal.api.principal import Needs
from shoal.api.problems import Refusal

STATE = "certificate"  # in the app's state: returns it as PEM


class Certificate(Controller):
    path = "/v1/certificate"
    opt = Needs.OPEN.opt

    @get(media_type="application/x-pem-file", sync_to_thread=False)
    def certificate(self, request: Request[Any, Any, Any]) -> str:
        """Trust it only if its SHA-256 is the one that the head shows."""
        found = request.app.state.get(STATE)
        if found is None:
            raise Refusal(404, "this cluster does not use TLS")
        return str(found())
