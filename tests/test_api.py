"""From Python: the command line without a shell."""

from __future__ import annotations

import inspect
import pickle
import sys
from pathlib import Path

import pytest
import torch

import fedsim
from fedsim.campaign.plan import victims
from fedsim.core.errors import SpecError
from fedsim.core.spec import Spec
from fedsim.core.vault import Vault
from tests.conftest import SMALL, small_spec


@pytest.mark.slow
def test_a_bench_can_be_asked_for_twice(tmp_path: Path) -> None:
    one = "bench={defenses: [{name: clipping, strengths: [{norm: 1.0}]}]}"
    for attempt in ("a", "b"):
        table = fedsim.bench({}, *SMALL, "train.rounds=1", one, output=tmp_path / attempt)
        assert list(table["defense"]) == ["none", "clipping"]


def test_the_python_api_is_the_command_line_without_a_shell(tmp_path: Path) -> None:
    spec = small_spec("audit.victims=1")
    run = fedsim.audit(spec, "seed=3", output=tmp_path / "run", threat="B")
    assert run.spec.seed == 3
    assert set(run.scores["threat"]) == {"B"}
    assert torch.is_tensor(Vault(run.vault).read(*victims(run.spec)[0]).images)


def test_the_function_takes_what_the_command_takes() -> None:
    result = fedsim.lint({}, *SMALL, ignore=["labels"], threat="B")
    assert isinstance(result.facts.spec, Spec)
    assert not result.of("labels")
    with pytest.raises(SpecError, match="did you mean 'labels'"):
        fedsim.lint({}, *SMALL, ignore=["lables"])


def test_functions_stay_what_users_call_when_rooms_of_their_name_are_imported() -> None:
    import fedsim.audit.repair as repair
    import fedsim.bench.table
    import fedsim.lint.facts

    assert all(inspect.isfunction(call) for call in (fedsim.audit, fedsim.bench, fedsim.lint))
    assert fedsim.audit.__module__ == fedsim.bench.__module__ == "fedsim"
    assert repair is sys.modules["fedsim.audit.repair"]
    # What is in a room is found through the function of its name as well.
    assert fedsim.audit.repair is repair  # type: ignore[attr-defined]
    assert fedsim.lint.facts is sys.modules["fedsim.lint.facts"]  # type: ignore[attr-defined]
    assert inspect.signature(fedsim.bench).parameters.keys() >= {"spec", "overrides", "output"}
    assert pickle.loads(pickle.dumps(fedsim.audit)) is fedsim.audit


def test_a_section_of_another_spec_can_be_given_as_it_is() -> None:
    train = {**small_spec().train.model_dump(), "rounds": 3}
    found = fedsim.lint(small_spec(), train=train, ignore=[])
    assert found.facts.spec.train.rounds == 3
