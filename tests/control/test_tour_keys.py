"""Every host of a tour gets the same key on the way, and nobody can guess it from the state."""

from __future__ import annotations

from shoal.control.tour_keys import TourKeys
from shoal.model.commands import Check, Envelope
from shoal.model.fabric import Host, Tour

HOSTS = (Host("a", "127.0.0.1", 1), Host("b", "127.0.0.1", 2))


def keys_of(tours: TourKeys, sent: list[Envelope], id_: str) -> set[str]:
    sent.clear()
    for own, host in enumerate(HOSTS):
        tour = Tour(hosts=HOSTS, own=own)
        check = Check(node=host.node, incarnation=1, id=id_, tour=tour)
        other = Check(node=host.node, incarnation=1, id="c1")
        tours.send(host.node, Envelope(1, own, (other, check)))
    assert [envelope.commands[0] for envelope in sent] == [
        Check(node=host.node, incarnation=1, id="c1") for host in HOSTS
    ]
    return {
        command.tour.key
        for envelope in sent
        for command in envelope.commands
        if isinstance(command, Check) and command.tour
    }


def test_hosts_of_one_tour_share_a_key_and_other_tours_and_controllers_have_others() -> None:
    sent: list[Envelope] = []
    first = TourKeys(lambda _, envelope: sent.append(envelope))
    later = TourKeys(lambda _, envelope: sent.append(envelope))
    found = [keys_of(first, sent, "t1"), keys_of(first, sent, "t2"), keys_of(later, sent, "t1")]
    assert [len(keys) for keys in found] == [1, 1, 1]
    assert len(set.union(*found)) == 3
    assert keys_of(first, sent, "t1") == found[0]
    assert all(len(key) == 64 for keys in found for key in keys)
