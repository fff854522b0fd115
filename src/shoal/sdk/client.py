"""`shoal.Client`: the API for Python programs. The fields of a job or service are keywords."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shoal import client
from shoal.client import ShoalError
from shoal.forms.failure import BadField
from shoal.forms.pack import packed, packed_service
from shoal.forms.request import JOB, SERVICE, Form, Request, Spec, complete
from shoal.model.views import JobView, ServiceView

Command = str | Sequence[str]


class Client(client.Client):
    """A cluster. `Client()` is the one that the `shoal` command uses: of this user on this machine,
    or the context in use. `Client(context="lab")` is a cluster that you logged in to; the folder
    of a job then travels with it."""

    def run(self, command: Command, **fields: Any) -> JobView:
        """Submits a job and returns at once. The keywords are the fields of a job file:"""
        spec, pack = _request(JOB, {"command": command, **fields})
        return self.submit(packed(self, spec, pack))

    def serve(self, name: str, command: Command, **fields: Any) -> ServiceView:
        """Starts or changes a service and returns at once. The keywords are the fields of a
        service file:"""
        spec, pack = _request(SERVICE, {"name": name, "command": command, **fields})
        return self.submit_service(packed_service(self, spec, pack))


for _method, _form in ((Client.run, JOB), (Client.serve, SERVICE)):  # for help(shoal.Client)
    _lines = [f"    {name}: {field.text}" for name, field in _form.fields.items()]
    _method.__doc__ = "\n".join([_method.__doc__ or "", *_lines])


def _request(form: Form[Spec], fields: dict[str, Any]) -> Request[Spec]:
    given = {name: value for name, value in fields.items() if value is not None}
    try:
        form.check_names(given)
        return complete(form, given)
    except BadField as error:
        raise ShoalError(error.message, error.field) from None
