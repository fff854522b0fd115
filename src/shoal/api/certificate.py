"""The certificate that clients keep when they log in: they compare its fingerprint first."""

from __future__ import annotations

from typing import Any

from litestar import Controller, Request

from shoal.api.handling import handles
from shoal.api.problems import Refusal
from shoal.calls.page import MachineCalls

STATE = "certificate"  # in the app's state: returns it as PEM


class Certificate(Controller):
    @handles(MachineCalls.certificate, media_type="application/x-pem-file")
    def certificate(self, request: Request[Any, Any, Any]) -> str:
        found = request.app.state.get(STATE)
        if found is None:
            raise Refusal(404, "this cluster does not use TLS")
        return str(found())
