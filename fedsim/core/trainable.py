"""Trainable: which parameters of a model its clients train, and low-rank adapters beside them.

This is decided once, right after a model is built, and `requires_grad` carries it from there:
clients learn, upload and replay what it names, attacks look for nothing else. LoRA (Hu et al. 2021)
is that of the library peft, which puts its layers around those of the model in place:
``blocks.0.attn.qkv`` becomes ``blocks.0.attn.qkv.base_layer`` with ``lora_A`` and ``lora_B`` beside
it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn

from fedsim.core.anatomy import NORMS, found_in, head_names, own, remember, vit_parts
from fedsim.core.errors import ModelError, did_you_mean
from fedsim.core.lora import LORA, WORDS, Lora, Trainable, wanted

_ADAPTER = "default"  # peft's name for the only one
_FIRST = 0  # seeds what adapters begin with, where the model's own seed is not given


def restricted(
    model: nn.Module, trainable: Trainable, lora: Lora | None = None, *, seed: int = _FIRST
) -> nn.Module:
    """The model with its adapters, training what is chosen and nothing else; what was frozen before
    stays so. The same model, changed in place."""
    words = wanted(trainable)
    if words == ("all",):
        return model
    if LORA in words:
        _adapt(model, lora or Lora(), seed)
    chosen = set(choose(model, trainable))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in chosen)
    return model


def choose(model: nn.Module, trainable: Trainable) -> list[str]:
    """The names of the parameters that are trained, in the model's order; a word or a pattern that
    names none of them is an error.

    ``head``: the layer that gives the logits; ``norm``: scales and shifts of every norm; ``bias``:
    every bias (BitFit, Zaken et al. 2022); ``lora``: the adapters. A pattern names parameters by
    their whole name with wildcards (``blocks.0.*``) or by a part of it between dots (``pos_embed``,
    ``blocks.0``).
    """
    parameters = dict(model.named_parameters())
    chosen: set[str] = set()
    for word in wanted(trainable):
        names = _named(model, word, parameters)
        if not names:
            hint = did_you_mean(word, [*WORDS, *parameters])
            raise ModelError(
                f"train.trainable: a {type(model).__name__} has no parameters '{word}'{hint}."
            )
        free = [name for name in names if word == LORA or parameters[name].requires_grad]
        chosen |= set(free)
    if not chosen:
        raise ModelError(
            f"train.trainable: the defenses leave nothing of {', '.join(wanted(trainable))} to be "
            f"trained."
        )
    return [name for name in parameters if name in chosen]


def named_part(model: nn.Module, trained: Collection[str]) -> tuple[str, ...] | None:
    """Words or patterns that choose just these parameters of those that can be trained, as few as
    modules allow; None where none do, because names end alike."""
    free = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    part = set(trained)
    for word in ("head", "norm", "bias"):
        if _chosen_by(model, word) == part:
            return (word,)
    patterns: list[str] = []
    for name in (name for name in free if name in part):
        places = name.split(".")
        above = [".".join(places[:end]) for end in range(1, len(places))]
        whole = [a for a in above if all(n in part for n in free if n.startswith(f"{a}."))]
        patterns.append(f"{whole[0]}.*" if whole else name)
    patterns = list(dict.fromkeys(patterns))
    return tuple(patterns) if _chosen_by(model, tuple(patterns)) == part else None


def _chosen_by(model: nn.Module, trainable: Trainable) -> set[str]:
    try:
        return set(choose(model, trainable))
    except ModelError:
        return set()


def saved_names(model: nn.Module) -> dict[str, str]:
    """The model's own names of what peft keeps of it (`get_peft_model_state_dict`), by the names
    that it has there, in that order; nothing of a model that peft did not wrap."""
    if not adapted_layers(model) or not hasattr(model, "peft_config"):
        return {}
    own_names = {tensor.data_ptr(): name for name, tensor in model.state_dict().items()}
    kept = _peft().get_peft_model_state_dict(model, save_embedding_layers=False)
    return {n: own_names[t.data_ptr()] for n, t in kept.items() if t.data_ptr() in own_names}


def adapted_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers that have a LoRA adapter, by name: whoever put it there."""
    return {n: m for n, m in model.named_modules() if hasattr(m, "base_layer") and _is_adapted(m)}


def _is_adapted(module: nn.Module) -> bool:
    return isinstance(getattr(module, "lora_A", None), nn.ModuleDict)


def _named(model: nn.Module, word: str, parameters: Mapping[str, nn.Parameter]) -> list[str]:
    match word:
        case "all":
            return [name for name in parameters if own(name)]
        case "head":
            return head_names(model)
        case "norm":
            return _in_norms(model)
        case "bias":
            return [n for n in parameters if _last(n).endswith("bias") and own(n)]
        case "lora":
            return [name for name in parameters if not own(name)]
        case pattern:
            return [name for name in parameters if _fits(name, pattern)]


def _in_norms(model: nn.Module) -> list[str]:
    return [
        f"{place}.{name}" if place else name
        for place, module in model.named_modules()
        if isinstance(module, NORMS) or "Norm" in type(module).__name__
        for name, _ in module.named_parameters(recurse=False)
    ]


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _fits(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or f".{pattern}." in f".{name}."


# -- adapters -----------------------------------------------------------------------------------


def _adapt(model: nn.Module, lora: Lora, seed: int) -> None:
    """Put adapters on the target layers; what was found in the model keeps its place."""
    if adapted_layers(model):
        raise ModelError(
            f"train.trainable: this {type(model).__name__} has LoRA adapters of its own already; "
            f"train them by a pattern, trainable: ['*lora_*']."
        )
    targets = _targets(model, lora)
    peft = _peft()
    settings = peft.LoraConfig(
        r=lora.r, lora_alpha=lora.alpha, target_modules=targets, lora_dropout=0.0
    )
    free = {name: p.requires_grad for name, p in model.named_parameters()}
    found = found_in(model)
    device = next(model.parameters()).device
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            peft.inject_adapter_in_model(settings, model, adapter_name=_ADAPTER)
    except (ValueError, AttributeError) as error:  # the latter for a layer inside another target
        said = str(error).strip().splitlines()[0]
        raise ModelError(f"train.lora does not fit a {type(model).__name__}: {said}.") from error
    model.to(device)
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0  # its fast path in eval mode reads past adapters
    moved = {name: f"{name}.base_layer" for name in targets}
    for name, parameter in model.named_parameters():  # peft froze all that is not its own
        before = _before(name)
        parameter.requires_grad_(free.get(before, True))
    if found is not None:
        remember(model, found.renamed(lambda name: _moved(name, moved)))


def _before(name: str) -> str:
    return name.replace(".base_layer.", ".")


def _moved(name: str, moved: Mapping[str, str]) -> str:
    """Where a parameter is, now that its layer has an adapter."""
    place, _, last = name.rpartition(".")
    return f"{moved[place]}.{last}" if place in moved else name


def _targets(model: nn.Module, lora: Lora) -> list[str]:
    """The layers that get an adapter."""
    able = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)}
    inside = _inside_attention(model)
    able = {name: module for name, module in able.items() if name not in inside}
    if not lora.targets:
        return _in_blocks(model, able)
    chosen: list[str] = []
    for pattern in lora.targets:
        names = [name for name in able if _fits(name, pattern)]
        if not names:
            hint = did_you_mean(pattern, able)
            raise ModelError(
                f"train.lora.targets: a {type(model).__name__} has no linear layer or convolution "
                f"'{pattern}'{hint} that an adapter can be put on."
            )
        chosen += names
    return list(dict.fromkeys(chosen))


def _inside_attention(model: nn.Module) -> set[str]:
    """Layers that torch's own attention reads past: an adapter on them would never be asked."""
    return {
        f"{place}.{name}"
        for place, module in model.named_modules()
        if isinstance(module, nn.MultiheadAttention)
        for name, _ in module.named_modules()
        if name
    }


def _in_blocks(model: nn.Module, able: Mapping[str, nn.Module]) -> list[str]:
    try:
        blocks: Sequence[str] = vit_parts(model).blocks
    except ModelError:
        blocks = ()
    inside: Callable[[str], bool] = lambda name: any(name.startswith(f"{b}.") for b in blocks)  # noqa: E731
    chosen = [n for n, m in able.items() if isinstance(m, nn.Linear) and inside(n)]
    if not chosen:
        raise ModelError(
            f"train.lora.targets: a {type(model).__name__} has no blocks of a transformer with "
            f"linear layers; name the layers that get an adapter."
        )
    return chosen


def _peft():  # type: ignore[no-untyped-def]
    """The library, which is an extra."""
    try:
        import peft
    except ImportError as error:
        raise ModelError(
            "train.trainable: lora needs the library peft: pip install 'fedsim[peft]'."
        ) from error
    return peft
