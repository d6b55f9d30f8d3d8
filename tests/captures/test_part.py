"""Apps whose clients train a part of their model and say nothing of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord
from torch import nn

from fedsim.audit.captured import audit_captured
from fedsim.core.errors import SpecError
from fedsim.core.trainable import saved_names
from fedsim.lint import lint
from tests import flower_task as task
from tests.flower_app import App, captured, entry, events, settled, updates
from tests.tutorials import HandWrittenViT


def head_alone() -> nn.Module:
    """As people fine-tune: the head of a network that was made elsewhere, from fixed weights."""
    torch.manual_seed(3)
    model = HandWrittenViT(task.CLASSES, task.SIDE)
    model.requires_grad_(requires_grad=False)
    model.head.requires_grad_(requires_grad=True)
    return model


def whole() -> nn.Module:
    """The same network; that the app freezes it, its server does not say."""
    return head_alone().requires_grad_(requires_grad=True)


def adapted() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    settings = LoraConfig(r=4, target_modules=["to_q", "to_kv"], modules_to_save=["head"])
    return get_peft_model(HandWrittenViT(task.CLASSES, task.SIDE), settings)


def adapters_of(state: dict[str, Any]) -> ArrayRecord:
    names = saved_names(adapted())
    return ArrayRecord({there: state[own] for there, own in names.items()})


def load_adapters(model: Any, record: ArrayRecord) -> None:
    from peft import set_peft_model_state_dict

    set_peft_model_state_dict(model, record.to_torch_state_dict())


def test_what_never_moves_is_not_trained_by_whoever_replays_the_clients(tmp_path: Path) -> None:
    app = App(model=head_alone, witnessed=True)
    app.run(captured(app, tmp_path / "mine", model=whole), 1)
    run = audit_captured(tmp_path / "mine", overrides=["attacks=[{name: features}]"])
    assert run.spec.train.trainable == ("head",)
    told = entry(run, "features")
    assert told["canary"]["ok"]
    assert told["verdict"] == "NOT RECOVERED"
    assert "claims no picture" in told["words"]
    assert "train.trainable is head: nothing else moved" in events(run, "inferred")


def test_no_picture_is_certain_where_the_head_alone_is_trained(tmp_path: Path) -> None:
    app = App(model=head_alone, examples=1, batch_size=1)
    app.run(captured(app, tmp_path / "mine", model=whole, batch_size=1), 1)
    run = settled(tmp_path / "mine")
    certain = {found.rule for found in lint(run.spec, trust=True).findings
               if found.severity == "certain"}  # fmt: skip
    assert certain == {"labels"}
    assert [attack.name for attack in run.spec.attacks] == ["features", "inverting_gradients"]


def test_a_part_that_is_declared_and_is_not_what_moved_is_refused(tmp_path: Path) -> None:
    app = App(model=head_alone)
    app.run(captured(app, tmp_path / "mine", model=whole), 1)
    with pytest.raises(SpecError, match=r"declared as norm, and .* moved 'head.bias' too"):
        settled(tmp_path / "mine", "train.trainable=norm")
    noisy = "defenses=[{name: gaussian_noise, std: 0.1}]"  # which may move what nobody trains
    run = settled(tmp_path / "mine", "train.trainable=[head.bias]", noisy)
    assert {name for seen in updates(run) for name in seen.update.tensors} == {"head.bias"}


def test_adapters_that_travel_alone_are_found_in_the_model(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    app = App(model=adapted, arrays=adapters_of, load=load_adapters, witnessed=True)
    app.run(captured(app, tmp_path / "mine"), 2)
    run = settled(tmp_path / "mine")
    free = {name for name, p in adapted().named_parameters() if p.requires_grad}
    assert {name for seen in updates(run) for name in seen.update.tensors} == free
    assert [attack.name for attack in run.spec.attacks] == ["features", "inverting_gradients"]
    assert events(run, "not_sent")
    again = audit_captured(tmp_path / "mine", overrides=["attacks=[{name: features}]"])
    assert entry(again, "features")["canary"]["ok"]
