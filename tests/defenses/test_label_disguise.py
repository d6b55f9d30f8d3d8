"""Label disguise: fewer labels than pictures."""

from __future__ import annotations

from fedsim.clients.shards import draw_batches
from fedsim.core.spec import load_spec


def test_a_disguised_batch_has_fewer_labels_than_pictures() -> None:
    spec = load_spec({}, ["data={clients: 2}", "train={batch_size: 8, evaluate: false}"])
    hidden = load_spec(
        spec.model_dump(mode="json"), ["defenses=[{name: label_disguise, share: 0.25}]"]
    )
    for round_ in range(1, 6):
        ((rows, (_, labels)),) = draw_batches(hidden, round_, 0)
        assert len(labels.unique()) == 2
        assert len(rows) == 8
    ((_, (_, labels)),) = draw_batches(spec, 1, 0)
    assert len(labels.unique()) > 2
