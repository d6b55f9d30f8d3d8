"""Binding: a pass is of the message in whose time it lies, or of none."""

from __future__ import annotations

import torch

from fedsim.captures.binding import Album, Asked, bind
from fedsim.captures.passes import NO_PASS, About, Pass

HERE, THERE = "server", "client"


def asked(round_: int, sent: float, received: float, node: int = 1, *, kept: bool = True) -> Asked:
    return Asked(round_, 0, node, sent, received, kept)


def seen(began: float, ended: float, source: str = "a", host: str = HERE, **more: object) -> Pass:
    rows = [[0, 1], [2, 3]]
    said = {"source": source, "loader": "one", "number": 1, "run_id": 7, "node_id": 1, "host": host}
    said |= {"began": began, "ended": ended, "exhausted": True, "rows": rows}
    about = About.model_validate({**said, "loose": [0, 1, 2, 3], **more})
    pictures = torch.arange(4.0).view(4, 1, 1, 1).expand(4, 3, 2, 2)
    return Pass(about, torch.zeros(0), pictures, torch.arange(4))


def test_on_one_machine_the_time_tells() -> None:
    first, second = asked(1, 10, 20), asked(2, 30, 40)
    passes = [seen(31, 32, "b"), seen(11, 12), seen(13, 14, number=2), seen(25, 26, "c")]
    bound, unbound = bind([second, first], passes, HERE)
    assert {b.asked.round: [p.about.began for p in b.passes] for b in bound} == {
        1: [11, 13],
        2: [31],
    }
    assert not unbound


def test_a_round_in_which_a_witness_saw_nothing_has_no_truth() -> None:
    bound, unbound = bind([asked(1, 10, 20), asked(2, 30, 40)], [seen(11, 12)], HERE)
    assert [b.asked.round for b in bound] == [1]
    assert [(a.round, why) for a, why in unbound] == [
        (2, "its witness saw nothing while it trained")
    ]


def test_several_loaders_in_one_round_are_no_truth() -> None:
    passes = [seen(11, 12), seen(13, 14, "b", loader="another")]
    bound, unbound = bind([asked(1, 10, 20)], passes, HERE)
    assert not bound
    assert "several loaders" in unbound[0][1]


def test_the_same_loader_may_be_witnessed_again_in_every_epoch() -> None:
    bound, _ = bind([asked(1, 10, 20)], [seen(11, 12), seen(13, 14, "b")], HERE)
    assert len(bound[0].passes) == 2


def test_a_pass_that_was_lost_is_no_truth() -> None:
    bound, unbound = bind([asked(1, 10, 20)], [seen(11, 12, lost="too much")], HERE)
    assert not bound
    assert "too much" in unbound[0][1]


def test_between_machines_the_clock_is_set_right() -> None:
    messages = [asked(1, 10, 20), asked(2, 30, 40)]
    passes = [seen(1011, 1018, "a", THERE), seen(1031, 1038, "b", THERE)]
    bound, _ = bind(messages, passes, HERE)
    assert [(b.asked.round, b.passes[0].about.source) for b in bound] == [(1, "a"), (2, "b")]


def test_between_machines_a_witness_too_few_is_no_truth() -> None:
    messages = [asked(1, 10, 20), asked(2, 30, 40)]
    bound, unbound = bind(messages, [seen(1011, 1018, "a", THERE)], HERE)
    assert not bound
    assert len(unbound) == 2


def test_between_machines_times_that_no_clock_explains_are_no_truth() -> None:
    messages = [asked(1, 10, 20), asked(2, 30, 40)]
    passes = [seen(1011, 1018, "a", THERE), seen(1131, 1138, "b", THERE)]
    assert bind(messages, passes, HERE)[0] == []


def test_who_has_no_witness_is_not_told() -> None:
    assert bind([asked(1, 10, 20, node=2)], [seen(11, 12)], HERE) == ([], [])


def test_a_truth_has_the_batches_in_their_order() -> None:
    one = seen(11, 12, exhausted=False)
    (bound,), _ = bind([asked(1, 10, 20)], [one], HERE)
    album = Album([one], (0.5,) * 3, (0.5,) * 3)
    whole = album.truth(bound, "of this update")
    assert whole is not None
    assert (whole.batches, whole.update) == ([[0, 1], [2, 3]], "of this update")
    torch.testing.assert_close(whole.images[3], torch.full((3, 2, 2), 2.0))
    short = album.truth(bound, "", drop_last=True)
    assert short is not None
    assert short.batches == [[0, 1]]
    assert len(short.images) == 2
    assert Album([], (0.5,) * 3, (0.5,) * 3).truth(bound, "") is None


def test_a_witness_without_a_pass_says_so_where_no_other_speaks() -> None:
    silent = seen(11, 11, "b", number=NO_PASS, rows=[], lost="nothing came")
    bound, unbound = bind([asked(1, 10, 20)], [silent], HERE)
    assert not bound
    assert "nothing came" in unbound[0][1]
    bound, unbound = bind([asked(1, 10, 20)], [silent, seen(12, 13)], HERE)  # of a validation set
    assert len(bound[0].passes) == 1
    assert not unbound
