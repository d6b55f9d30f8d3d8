"""Models: any timm classifier by name, anybody's own by import path, and their checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn

# Our own small networks register themselves with timm.
import fedsim.core.convnet
import fedsim.core.mlp  # noqa: F401
from fedsim.core.anatomy import found_in, head_names, remember, vit_parts
from fedsim.core.dissection import dissect
from fedsim.core.errors import ModelError, did_you_mean
from fedsim.core.factories import build_by_path, is_import_path
from fedsim.core.files import named_in_utf8
from fedsim.core.imprinted import Imprinted
from fedsim.core.spec import ModelSpec

# Options of ours, beside timm's.
PLAIN_FIRST_BLOCK = "plain_first_block"
IMPRINT_LAYER = "imprint_layer"  # how many bins
# Options by which timm would open files and addresses: those are for model.checkpoint and
# model.pretrained to name, and an observation names neither.
OPENING = ("checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir", "pretrained")


def build_architecture(spec: ModelSpec, *, image_size: int, num_classes: int) -> nn.Module:
    """The model without its weights, for whoever loads them from a message."""
    bare = spec.model_copy(update={"pretrained": False, "checkpoint": None})
    return build_model(bare, image_size=image_size, num_classes=num_classes, seed=0)


def build_model(
    spec: ModelSpec, *, image_size: int, num_classes: int, seed: int,
    prepare: Callable[[nn.Module], nn.Module] = lambda model: model,
) -> nn.Module:  # fmt: skip
    """The model of a spec, in float32 on the CPU; the same seed gives the same weights.

    ``prepare`` makes of it what its defenses train. A checkpoint may hold what is added there as
    well; where it does not, that begins as it is added.
    """
    if not is_import_path(spec.name) and not timm.is_model(spec.name):
        near = did_you_mean(spec.name, timm.list_models())
        raise ModelError(
            f"timm knows no model '{spec.name}'{near}; one of your own is named by its import "
            f"path, package.module:factory."
        )
    for name in OPENING:
        if name in spec.options:
            raise ModelError(
                f"model.options has '{name}'; use model.checkpoint or model.pretrained for weights."
            )
    for name in ("device", "dtype"):
        if name in spec.options:
            raise ModelError(
                f"model.options has '{name}'; clients train in float32 where they are."
            )
    options: dict[str, Any] = {"num_classes": num_classes, **spec.options}
    plain = bool(options.pop(PLAIN_FIRST_BLOCK, False))
    bins = options.pop(IMPRINT_LAYER, None)
    if bins is not None and (not isinstance(bins, int) or isinstance(bins, bool) or bins < 2):
        raise ModelError(f"model.options.{IMPRINT_LAYER} is a number of bins, two or more.")
    if is_import_path(spec.name):
        model = _by_path(spec, image_size=image_size, num_classes=num_classes, seed=seed)
    else:
        model = _by_name(spec, options, image_size, seed)
    if plain:
        use_plain_first_block(model)
        if found_in(model) is not None:  # what was found there has changed
            remember(model, dissect(model, image_size))
    if spec.init == "classic":
        begin_classic(model, seed)
    state = None
    if spec.checkpoint:  # what is there already first: what is added may go by it
        state = read_checkpoint(Path(spec.checkpoint))
        own = model.state_dict()
        _load(model, {n: t for n, t in state.items() if n in own}, spec.checkpoint)
        state = {n: t for n, t in state.items() if n not in own}
    if bins is not None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            found = found_in(model)
            model = Imprinted(model, image_size, bins)
        if found is not None:
            remember(model, found.within("model"))
    model = prepare(model)
    if spec.checkpoint and state:
        _load(model, state, spec.checkpoint, missing=True)
    return model


def _by_name(spec: ModelSpec, options: dict[str, Any], image_size: int, seed: int) -> nn.Module:
    """One of timm's."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            return _create(spec, {"img_size": image_size, **options})
        except TypeError as error:
            if "img_size" not in str(error):  # fully convolutional: takes any size
                raise _bad_options(spec, error) from error
            try:
                return _create(spec, options)
            except TypeError as second:
                raise _bad_options(spec, second) from second


def _by_path(spec: ModelSpec, *, image_size: int, num_classes: int, seed: int) -> nn.Module:
    """One of somebody's own."""
    if spec.pretrained:
        raise ModelError(
            f"model.pretrained is for timm's models; give '{spec.name}' its weights by "
            f"model.checkpoint."
        )
    own = {k: v for k, v in spec.options.items() if k not in (PLAIN_FIRST_BLOCK, IMPRINT_LAYER)}
    return build_by_path(spec.name, own, image_size=image_size, num_classes=num_classes, seed=seed)


def begin_classic(model: nn.Module, seed: int) -> None:
    """Weights as ViT code began them before timm's: torch's own for every layer that has some,
    N(0, 1) for embeddings and tokens, which belong to no layer."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        owned = set()
        for module in model.modules():
            if callable(reset := getattr(module, "reset_parameters", None)):
                reset()
                owned |= {id(parameter) for parameter in module.parameters(recurse=False)}
        for parameter in model.parameters():
            if id(parameter) not in owned and parameter.ndim > 1:
                parameter.normal_()


class PlainBlock(nn.Module):
    """Attention, norm and MLP one after the other, without norm before and without skips: the first
    block of APRIL's Architecture A. It takes over a timm block's own parts."""

    attn: nn.Module
    norm2: nn.Module
    mlp: nn.Module

    def __init__(self, block: nn.Module):
        super().__init__()
        for name in ("attn", "norm2", "mlp"):
            self.add_module(name, block.get_submodule(name))

    def forward(self, tokens: Tensor, **options: Any) -> Tensor:
        result: Tensor = self.mlp(self.norm2(self.attn(tokens, **options)))
        return result


def use_plain_first_block(model: nn.Module) -> None:
    """Make ``model`` the Architecture A of APRIL: its first attention reads the bare tokens."""
    parts = vit_parts(model)
    blocks = model.get_submodule(parts.blocks[0].rpartition(".")[0]) if parts.blocks else None
    first = model.get_submodule(parts.blocks[0]) if parts.blocks else None
    wanted = ("attn", "norm2", "mlp")
    if not isinstance(blocks, nn.Sequential | nn.ModuleList) or not all(
        hasattr(first, name) for name in wanted
    ):
        raise ModelError(f"{PLAIN_FIRST_BLOCK} needs a ViT with blocks of attention and MLP.")
    assert first is not None
    blocks[0] = PlainBlock(first)


def _create(spec: ModelSpec, options: dict[str, Any]) -> nn.Module:
    # Both libraries log a failed download before raising; our error is to be the only message.
    for library in ("timm", "huggingface_hub"):
        logging.getLogger(library).setLevel(logging.CRITICAL)
    try:
        return timm.create_model(spec.name, pretrained=spec.pretrained, **options)
    except TypeError:
        raise
    except Exception as error:
        if spec.pretrained:
            raise ModelError(
                f"the pretrained weights of '{spec.name}' could not be fetched "
                f"({type(error).__name__}); connect to the hub once, or give "
                f"model.checkpoint a .safetensors or .pth file."
            ) from error
        raise _bad_options(spec, error) from error


def _bad_options(spec: ModelSpec, error: Exception) -> ModelError:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return ModelError(f"timm cannot build '{spec.name}' with options {spec.options}: {reason}.")


def load_checkpoint(model: nn.Module, path: Path) -> list[str]:
    """Load weights from ``path``; a head made for other classes is left as initialised. Returns the
    names that were left out."""
    return _load(model, read_checkpoint(path), path)


def read_checkpoint(path: Path) -> dict[str, Tensor]:
    """The tensors of a file. Never unpickles code: safetensors, or
    ``torch.load(weights_only=True)``."""
    if not path.is_file():
        raise ModelError(f"there is no checkpoint '{path}'.")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            with named_in_utf8(path) as name:
                state: Mapping[str, Any] = load_file(name)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ModelError(f"the checkpoint '{path}' cannot be read: {_first(error)}.") from error
    for wrapper in ("state_dict", "model", "model_state_dict"):
        if isinstance(state, Mapping) and isinstance(state.get(wrapper), Mapping):
            state = state[wrapper]
    return dict(state)


def _load(
    model: nn.Module, state: Mapping[str, Tensor], path: str | Path, *, missing: bool = False
) -> list[str]:
    """Put tensors into a model; ``missing``: some of its own may be."""
    expected = model.state_dict()
    try:
        head = head_names(model)
    except ModelError:  # somebody's own, without one
        head = []
    left_out = [n for n in head if n in state and state[n].shape != expected[n].shape]
    state = {name: tensor for name, tensor in state.items() if name not in left_out}
    wrong = [n for n in state if n in expected and state[n].shape != expected[n].shape]
    lacking = [n for n in expected if n not in state and n not in head]
    unknown = [n for n in state if n not in expected]
    for problem, names in (
        ("shapes differ", wrong),
        ("missing", [] if missing else lacking),
        ("unknown", unknown),
    ):
        if names:
            raise ModelError(
                f"the checkpoint '{path}' does not fit the model: {problem}: "
                f"{', '.join(names[:3])}{' ...' if len(names) > 3 else ''}."
            )
    model.load_state_dict(dict(state), strict=False)
    return left_out


def _first(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
