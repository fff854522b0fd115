"""Builds the engine that a supply names; its code is loaded only then."""

from __future__ import annotations

import importlib

from shoal.engines.supplying import SupplyContext
from shoal.ports import Supplier, SupplyError

SUPPLIERS = {
    "slurm": "shoal.engines.slurm.supplier:SlurmSupplier",
    "kubernetes": "shoal.engines.kubernetes.supplier:KubernetesSupplier",
    "ray": "shoal.engines.ray.supplier:RaySupplier",
}
# Installed with an extra of the package.
EXTRAS = {"ray": "ray", "kubernetes": "kubernetes"}


def build_supplier(engine: str, context: SupplyContext) -> Supplier:
    """Raises `SupplyError` with one line if there is no such engine or it cannot work here."""
    where = SUPPLIERS.get(engine)
    if where is None:
        raise SupplyError(f"there is no engine {engine!r}; there are: {', '.join(SUPPLIERS)}")
    module, _, name = where.partition(":")
    try:
        made: Supplier = getattr(importlib.import_module(module), name)(context)
    except ImportError as error:
        extra = EXTRAS.get(engine)
        fix = f"; install it on the head with: pip install 'shoal[{extra}]'" if extra else ""
        raise SupplyError(f"the engine {engine} cannot be loaded ({error}){fix}") from None
    return made
