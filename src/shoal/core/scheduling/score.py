"""Which of the fitting nodes a policy prefers: placements as small pure scores."""

from __future__ import annotations

from zlib import crc32

from shoal.core.books.vacancy import Footprint, Vacancy
from shoal.core.scheduling import classic
from shoal.core.state.room import Level
from shoal.core.state.state import Score, State, first_fit
from shoal.model.resources import WHOLE_GPU_MILLI, Kind


def _best_fit(_state: State, kind: Kind, before: Level, after: Level) -> tuple[float, ...]:
    return (-classic.best_fit(_vacancy(before, kind.gpu_model), _request(before, after)),)


def _packing(_state: State, kind: Kind, before: Level, after: Level) -> tuple[float, ...]:
    idle = (0,) * (kind.gpus - before.gpus - len(before.shares))
    vacancy = _vacancy(before, kind.gpu_model)
    vacancy = vacancy._replace(gpus=vacancy.gpus + idle)
    return (-classic.packing(vacancy, _request(before, after)), before.gpus)


def _clustering(_state: State, kind: Kind, before: Level, after: Level) -> tuple[float, ...]:
    """Like beside like, judged by what is free: shares of GPUs on nodes that share GPUs, whole GPUs
    on nodes that do not, and jobs without GPUs on nodes without; ties go to the fullest."""
    request = _request(before, after)
    shared = len(before.shares)
    if not request.gpus:
        return (kind.gpus, before.gpus)
    return (-shared if request.gpu_milli < WHOLE_GPU_MILLI else shared, before.gpus)


def _dot_product(_state: State, kind: Kind, before: Level, after: Level) -> tuple[float, ...]:
    return (-classic.dot_product(_vacancy(before, kind.gpu_model), _request(before, after)),)


def _fgd(state: State, kind: Kind, before: Level, after: Level) -> tuple[float, ...]:
    """Fragmentation gradient: where the least becomes unusable for jobs like those seen."""
    mix = state.foresight.mix.counts
    model = kind.gpu_model
    unusable = classic.unusable
    return (unusable(_vacancy(after, model), mix) - unusable(_vacancy(before, model), mix),)


def _random(state: State, kind: Kind, before: Level, _after: Level) -> tuple[float, ...]:
    """Random, but the same in every replay of one history."""
    return (crc32(repr((state.next_port, kind[:6], before)).encode()),)


def _request(before: Level, after: Level) -> Footprint:
    """What a gang takes of a node, as one task."""
    milli = before.gpu_milli - after.gpu_milli
    gpus, share = (1, milli) if 0 < milli < WHOLE_GPU_MILLI else (milli // WHOLE_GPU_MILLI, 1000)
    cpu_milli = before.cpu_milli - after.cpu_milli
    return Footprint(cpu_milli, before.memory_mb - after.memory_mb, gpus, share if gpus else 0)


def _foresight(state: State, kind: Kind, before: Level, after: Level) -> tuple[float, ...]:
    """What later jobs like those seen would have filled here and now cannot. Ties go to the fewest
    free GPUs, then to the least of the rest, so that large gaps stay whole."""
    value = state.foresight.value
    model = kind.gpu_model
    loss = value(_vacancy(before, model)) - value(_vacancy(after, model)) if kind.gpus else 0
    return (loss, after.gpu_milli, after.cpu_milli, after.memory_mb)


def look_ahead(state: State) -> None:
    """Foresight knows which jobs run short of places; it counts again when much has changed."""
    foresight, free = state.foresight, state.cluster
    if foresight.outdated(free.gpu_milli, state.totals.gpus * WHOLE_GPU_MILLI):
        vacancies = [
            (_vacancy(level, kind.gpu_model), len(index.nodes[level]))
            for kind, index in free.free.items()
            if kind.gpus
            for level in index.levels
        ]
        foresight.look(vacancies, free.gpu_milli)


def _vacancy(level: Level, model: str) -> Vacancy:
    gpus = (WHOLE_GPU_MILLI,) * level.gpus + level.shares[::-1]
    return Vacancy(level.cpu_milli, level.memory_mb, gpus, model)


PLACEMENTS: dict[str, Score] = {
    "first-fit": first_fit,
    "best-fit": _best_fit,
    "packing": _packing,
    "clustering": _clustering,
    "dot-product": _dot_product,
    "fgd": _fgd,
    "random": _random,
    "shoal": _foresight,
}
