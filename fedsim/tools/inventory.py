"""Inventory: what can be named in a spec, and what this machine has."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path

import torch

from fedsim.attacks import ATTACKS
from fedsim.attacks.manoeuvres import MANOEUVRES
from fedsim.attacks.suites import suite_called
from fedsim.audit.stages import versions
from fedsim.clients.data import dataset_names
from fedsim.core.errors import ModelError
from fedsim.core.knowledge import READERS, THREATS, Threat
from fedsim.core.metrics import lpips_unavailable
from fedsim.core.registry import resolve
from fedsim.core.sections import SUITES, Component
from fedsim.core.weights import BACKBONES, load_backbone
from fedsim.defenses import DEFENSES
from fedsim.defenses.guards import GUARDS


def _first_lines(kind: str, table: Mapping[str, str]) -> dict[str, str]:
    """The first paragraph of each entry's module: what it is."""
    import sys

    lines = {}
    for name in sorted(table):
        module = sys.modules[resolve(kind, table, name).__module__]
        lines[name] = (module.__doc__ or "").strip().split("\n\n")[0].replace("\n", " ")
    return lines


def _models() -> dict[str, str]:
    import timm

    return dict.fromkeys(timm.list_models(), "")


DATA_WORDS = {
    "photos": "built in: crops of scikit-image's colour photographs, labelled by picture",
    "lfw_subset": "built in: 200 small grey pictures, faces and not",
    "imagefolder": "any tree of class/picture under data.path, or a zip of one",
    "imagenet": "under data.path: folders by synset id, a flat val/ with the devkit, or Kaggle's",
    "celeba": "under data.path: the official files; data.label is an attribute or identity",
    "cifar10": "under data.path: the official python batches, class folders, or zips of them",
    "cifar100": "under data.path: as cifar10; data.label is fine or coarse",
    "mnist": "under data.path: the four idx files, packed or not",
    "hf:<name>": "a data set of the Hugging Face hub, or one saved by datasets under data.path",
}


def _grants(threat: Threat) -> str:
    return f"Grants {', '.join(sorted(threat.grants & READERS.keys()))}."


def _members(version: str) -> str:
    members = suite_called(Component(name=version)).members
    return f"attacks: {version}. {', '.join(m.component.short_name for m in members)}"


INVENTORY: dict[str, Callable[[], dict[str, str]]] = {
    "attacks": lambda: _first_lines("attack", ATTACKS),
    "suites": lambda: {version: _members(version) for version in SUITES},
    "defenses": lambda: _first_lines("defense", DEFENSES),
    "manoeuvres": lambda: _first_lines("manoeuvre", MANOEUVRES),
    "guards": lambda: _first_lines("guard", GUARDS),
    "data": lambda: {name: DATA_WORDS.get(name, "") for name in dataset_names()},
    "threats": lambda: {
        threat.letter: f"{threat.name}: {threat.words} {_grants(threat)}"
        for threat in THREATS.values()
    },
    "models": _models,
}


def weights_here() -> dict[str, str]:
    """The weights that can be fetched, and whether they were."""
    words = {}
    for name in BACKBONES:
        try:
            load_backbone(name)
            words[name] = f"{BACKBONES[name].file}"
        except ModelError as error:
            words[name] = str(error)
    return words


def diagnose() -> dict[str, str]:
    """What matters for a run on this machine, one line each."""
    findings = dict(versions())
    cuda = torch.cuda.is_available()
    findings["device"] = torch.cuda.get_device_name(0) if cuda else "CPU (torch sees no GPU)"
    findings["cores"] = str(os.cpu_count())
    findings["ray"] += " (installed)" if find_spec("ray") else " (missing)"
    findings["LPIPS"] = lpips_unavailable() or "weights found"
    hub = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser() / "hub"
    models = sorted(p.name for p in hub.glob("models--timm--*")) if hub.is_dir() else []
    findings["pretrained"] = (
        f"{len(models)} timm models in the hub cache"
        if models
        else "none in the hub cache; model.pretrained needs a network, model.checkpoint a file"
    )
    findings["data"] = f"{', '.join(dataset_names())} (photos and lfw_subset are built in)"
    return findings
