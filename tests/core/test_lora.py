"""What a spec says of adapters and of what is trained."""

from __future__ import annotations

import pytest

from fedsim.core.errors import SpecError
from fedsim.core.learning import Protocol
from fedsim.core.lora import Lora, wanted
from fedsim.core.spec import load_spec
from tests.conftest import small_spec


def test_a_choice_is_a_word_or_a_list() -> None:
    assert wanted("head") == ("head",)
    assert wanted(("lora", "head")) == ("lora", "head")


def test_a_spec_that_trains_all_is_the_spec_it_always_was() -> None:
    assert small_spec("train.trainable=all").digest() == small_spec().digest()
    assert small_spec("train.trainable=head").digest() != small_spec().digest()


def test_what_is_trained_is_announced() -> None:
    spec = small_spec("train.trainable=[lora, head]", "train.lora={r: 4, alpha: 8}")
    protocol = Protocol.of(spec.train, spec.data)
    assert protocol.trainable == ("lora", "head")
    assert protocol.lora == Lora(4, 8.0)


def test_adapters_that_nobody_trains_and_an_empty_choice_are_mistakes() -> None:
    with pytest.raises(SpecError, match="trainable: lora"):
        load_spec({}, ["train.lora.r=4"])
    with pytest.raises(SpecError, match="names nothing"):
        load_spec({}, ["train.trainable=[]"])
    with pytest.raises(SpecError, match=r"train\.lora\.r"):
        load_spec({}, ["train.trainable=lora", "train.lora.r=0"])
