"""Facts: what a spec says of its federation before a round runs, as the rules need it.

Shapes come from the architecture as the defenses leave it (`prepare_model`, `requires_grad`), never
from a model's name. A ViT is built with its first blocks only: the closed forms use no others.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from fedsim.attacks.closed.adapters import adapter_ranks
from fedsim.attacks.matching.matcher import silence
from fedsim.attacks.row_space import Size, size_of
from fedsim.clients import images_of, shards_of
from fedsim.core.anatomy import VitParts, batchnorm_names, head_names, tensor_of, vit_parts
from fedsim.core.augment import check_augmentation
from fedsim.core.defense import Defense
from fedsim.core.dissection import added
from fedsim.core.epochs import steps_of_round
from fedsim.core.errors import AttackError, DataError, ModelError
from fedsim.core.factories import is_import_path
from fedsim.core.knowledge import refuse_unplayed
from fedsim.core.lora import WORDS, wanted
from fedsim.core.models import build_architecture, build_model
from fedsim.core.spec import Spec
from fedsim.core.trainable import adapted_layers
from fedsim.defenses.applied import declared, prepared, refuse_other_training
from fedsim.lint.rehearsal import Rehearsal, rehearse

SHALLOW = 2  # blocks of a ViT that are built
LARGEST = 100_000_000  # parameters, beyond which no weights are made and nothing is rehearsed
ACTS = ("protect_batch", "toss", "batch_gradient", "protect_gradient", "protect_update")
ASSUMED_CLASSES = 10  # where the data set is not on this machine


@dataclass(frozen=True)
class Tokens:
    """The geometry of a ViT's tokens, and which of its gradients are uploaded."""

    patches: int  # N
    pixels: int  # P, numbers in a patch
    width: int  # D
    prefix: int  # tokens that belong to no patch
    centred: bool  # LayerNorm reads the tokens: their gradients are orthogonal to ones
    positions: bool  # whether there is a position embedding
    position_rank: int
    uploads_position: bool
    uploads_patches: bool  # of the projection itself
    rows: Size | None  # the system of `row_space` for one patch; None: no first attention
    shows_patches: bool = True  # the projection's gradient, or as much of an adapter's as it takes
    once: bool = True  # whether positions are added in one place, and their gradient is of that

    @property
    def gradient_rank(self) -> int:
        """The largest rank that the position embedding's gradient can have."""
        return self.width - 1 if self.centred else self.width

    @property
    def solvable_by_patches(self) -> bool:
        """Whether the system of `patch_solve` determines every patch."""
        uploaded = self.uploads_position and self.shows_patches
        return uploaded and self.gradient_rank >= self.patches

    @property
    def solvable_by_rows(self) -> bool:
        """Whether the system of `row_space` determines every patch."""
        full = self.positions and self.position_rank >= self.patches
        return full and self.rows is not None and self.rows.determined

    @property
    def form(self) -> str | None:
        """The closed form to try: where positions are uploaded, `row_space` adds nothing, unless
        they are added again further on."""
        if self.uploads_position and self.shows_patches and self.once:
            return "patch_solve"
        return "row_space" if self.solvable_by_rows else None


@dataclass(frozen=True)
class NamedDefense:
    """One defense of the spec."""

    name: str
    defense: Defense

    def acts_on(self, *hooks: str) -> bool:
        """Whether it overrides one of these hooks, in some round."""
        kinds = {type(self.defense), type(self.defense.at_round(1, 0, [0]))}
        return any(getattr(k, hook) is not getattr(Defense, hook) for k in kinds for hook in hooks)

    @property
    def by_chance(self) -> bool:
        """Whether a coin may leave some batches as they are."""
        return self.acts_on("protect_batch") or self.defense.spares


@dataclass(frozen=True)
class Facts:
    """All that the rules look at."""

    spec: Spec
    classes: int
    data_here: bool
    shard: int | None  # samples of the client that holds fewest; None: not known
    images: int | None  # distinct ones behind an update of that client; None: not known
    steps: int | None  # that it takes; None: not known
    defenses: tuple[NamedDefense, ...]
    tokens: Tokens | None  # None: no ViT
    head: tuple[str, ...]  # "weight" and "bias", as far as their gradients are uploaded
    biased: bool  # whether the head has a bias at all
    batchnorms: int
    chain: bool  # a plain chain of layers, which R-GAP inverts one by one
    units: int | None  # of a first linear layer before a ReLU, which shows whole batches
    tosses: bool  # the model leaves parts out at random while it is trained
    parameters: int
    trained: int  # of these, numbers that clients train
    adapted: bool  # whether adapters are among them
    rehearsal: Rehearsal

    @property
    def one_image(self) -> bool:
        return self.images == 1

    def named(self, name: str) -> NamedDefense | None:
        return next((named for named in self.defenses if named.name == name), None)


def gather(spec: Spec) -> Facts:
    """The facts of a spec; a spec that could not run is an error, as it is in an audit."""
    refuse_unplayed(spec.threat, spec.server)
    named_defenses = tuple(
        NamedDefense(c.name, d) for c, d in zip(spec.defenses, declared(spec.defenses), strict=True)
    )
    classes, shard = _data(spec)
    refuse_other_training(spec.train, [named.defense for named in named_defenses])
    check_augmentation([one.model_dump() for one in spec.train.augment], spec.data.image_size)
    steps, images = _behind(spec, shard)
    defenses = [named.defense for named in named_defenses]
    model = _built(spec, classes or ASSUMED_CLASSES, defenses)
    numbers = _numbers(spec, classes or ASSUMED_CLASSES, defenses, model)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    tokens = _tokens(model, trained, spec.data.image_size, moved=spec.train.rounds > 1)
    rehearsed = partial(
        rehearse,
        spec,
        model,
        defenses,
        classes=classes or ASSUMED_CLASSES,
        steps=(steps or 1) if images == 1 else 1,
        acting=any(named.acts_on(*ACTS) for named in named_defenses),
        chance=any(named.by_chance for named in named_defenses),
    )
    rehearsal = rehearsed(form=tokens.form if tokens is not None and images == 1 else None)
    if tokens is not None and rehearsal.form == "patch_solve" and not rehearsal.exact:
        again = replace(tokens, once=False)
        other = rehearsed(form=again.form) if again.form == "row_space" else rehearsal
        if other.exact:
            tokens, rehearsal = again, other
    return Facts(
        spec=spec,
        classes=classes or ASSUMED_CLASSES,
        data_here=classes is not None,
        shard=shard,
        images=images,
        steps=steps,
        defenses=named_defenses,
        tokens=tokens,
        head=_head(model, trained),
        biased=_is_biased(model),
        batchnorms=len(batchnorm_names(model)),
        chain=_is_chain(model, spec.data.image_size),
        units=_units(model, trained, spec),
        tosses=spec.train.mode == "train" and bool(silence(copy.deepcopy(model).train())),
        parameters=numbers[0],
        trained=numbers[1],
        adapted=bool(adapted_layers(model)),
        rehearsal=rehearsal,
    )


def _is_biased(model: nn.Module) -> bool:
    try:
        return len(head_names(model)) > 1
    except ModelError:
        return False


def _built(spec: Spec, classes: int, defenses: Sequence[Defense]) -> nn.Module:
    """The model of a spec as its defenses leave it."""
    if spec.model.checkpoint:  # its positions count, and it fits the whole model only
        bare = spec.model.model_copy(update={"pretrained": False})
        return build_model(
            bare, image_size=spec.data.image_size, num_classes=classes, seed=spec.seed,
            prepare=partial(prepared, defenses=defenses, train=spec.train),
        )  # fmt: skip
    return prepared(_bare(spec, classes), defenses, spec.train)


def _bare(spec: Spec, classes: int) -> nn.Module:
    """The model of a spec, without numbers in it where it would be too large."""
    side = spec.data.image_size
    if is_import_path(spec.model.name):  # whose code may not do without numbers
        own = build_architecture(spec.model, image_size=side, num_classes=classes)
        return own.to("meta") if sum(p.numel() for p in own.parameters()) > LARGEST else own
    with torch.device("meta"):
        whole = build_architecture(spec.model, image_size=side, num_classes=classes)
    chosen = spec.model
    if _blocks(whole) > SHALLOW and not _names_layers(spec):
        shallow = chosen.model_copy(update={"options": {**chosen.options, "depth": SHALLOW}})
        try:
            with torch.device("meta"):
                small = build_architecture(shallow, image_size=side, num_classes=classes)
            if _blocks(small) == SHALLOW:
                whole, chosen = small, shallow
        except ModelError:
            pass  # a class whose depth cannot be chosen is built as it is
    if sum(p.numel() for p in whole.parameters()) > LARGEST:
        return whole
    return build_architecture(chosen, image_size=side, num_classes=classes)


def _names_layers(spec: Spec) -> bool:
    """Whether patterns say what is trained: they may mean blocks that a shallow model lacks."""
    patterns = set(wanted(spec.train.trainable)) - set(WORDS)
    return bool(patterns or spec.train.lora.targets)


def _numbers(
    spec: Spec, classes: int, defenses: Sequence[Defense], built: nn.Module
) -> tuple[int, int]:
    """How many numbers the whole model has, and how many of them are trained."""
    model = built
    if not spec.model.checkpoint and not is_import_path(spec.model.name):
        with torch.device("meta"):
            whole = build_architecture(
                spec.model, image_size=spec.data.image_size, num_classes=classes
            )
        if _blocks(whole) > _blocks(built):
            model = prepared(whole, defenses, spec.train)
    counts = [(p.numel(), p.requires_grad) for p in model.parameters()]
    return sum(n for n, _ in counts), sum(n for n, trained in counts if trained)


def _blocks(model: nn.Module) -> int:
    try:
        return len(vit_parts(model).blocks)
    except ModelError:
        return 0


def _data(spec: Spec) -> tuple[int | None, int | None]:
    """Classes, and samples of the smallest shard; None: unknown."""
    if spec.captured is not None:
        return spec.captured.classes, spec.captured.examples
    try:
        images = images_of(spec.data, "train")
    except DataError:
        return None, None
    shard = len(images) // spec.data.clients
    if spec.data.partition.kind != "iid":  # the partitioner takes seconds to import
        shard = min(len(samples) for samples in shards_of(spec.data, spec.seed))
    return len(images.classes), shard


def _behind(spec: Spec, shard: int | None) -> tuple[int | None, int | None]:
    """Steps that the client with fewest samples takes in a round, and distinct pictures in them."""
    train = spec.train
    if train.local_epochs and shard is None:
        return None, None
    steps = steps_of_round(train.local_steps, train.local_epochs, shard or 0, train.step_size)
    drawn = steps * train.step_size
    # Augmented, a picture that is drawn again is another one.
    return steps, drawn if shard is None or train.augment else min(drawn, shard)


def _head(model: nn.Module, trained: set[str]) -> tuple[str, ...]:
    try:
        weight, *bias = head_names(model)
    except ModelError:  # no linear head, so none whose gradient shows labels
        return ()
    uploaded = {"weight": weight in trained, "bias": bool(set(bias) & trained)}
    return tuple(part for part, there in uploaded.items() if there)


def _tokens(model: nn.Module, trained: set[str], side: int, *, moved: bool) -> Tokens | None:
    """``moved``: whether some round finds adapters past the zeros they begin with."""
    try:
        parts = vit_parts(model)
    except ModelError:
        return None
    weight = model.get_parameter(parts.patch_weight)
    attention = parts.attention
    normed = attention is not None and attention.norm is not None
    return Tokens(
        patches=parts.tokens,
        pixels=weight[0].numel(),
        width=weight.shape[0],
        prefix=parts.sequence - parts.tokens,
        centred=normed,
        positions=parts.position is not None or parts.measurable,
        position_rank=_position_rank(model, parts, side),
        uploads_position=parts.position in trained,
        uploads_patches=parts.patch_weight in trained,
        rows=size_of(model, parts, trained, moved=moved) if attention is not None else None,
        shows_patches=_shows_patches(model, parts, trained, moved=moved),
    )


def _shows_patches(model: nn.Module, parts: VitParts, trained: set[str], *, moved: bool) -> bool:
    """Whether `patch_solve` sees enough of the patch projection's gradient."""
    if parts.patch_weight in trained:
        return True
    pixels = model.get_parameter(parts.patch_weight)[0].numel()
    ranks = adapter_ranks(model, [parts.patch_weight], trained)
    return any(rank >= pixels or (moved and rank >= parts.tokens) for rank in ranks)


def _position_rank(model: nn.Module, parts: VitParts, side: int) -> int:
    """As `row_space` counts it; the largest possible where the model holds no numbers."""
    if parts.position is not None:
        rows = parts.rows_of(tensor_of(model, parts.position).detach())
    elif parts.measurable and not model.get_parameter(parts.patch_weight).is_meta:
        found = added(model, side)
        if found is None:
            return 0
        rows = found.positions
    else:
        return 0
    if rows.is_meta:
        return min(rows.shape)
    return int(torch.linalg.matrix_rank(rows.double(), rtol=1e-5))


def _is_chain(model: nn.Module, side: int) -> bool:
    from fedsim.attacks.rgap import chain

    try:
        chain(model, side)
    except AttackError:
        return False
    return True


def _units(model: nn.Module, trained: set[str], spec: Spec) -> int | None:
    """How many units the linear layer has that reads the whole picture, where `spear` reads its
    gradient."""
    from fedsim.attacks.closed.first_layer import first_layer

    side, mode = spec.data.image_size, model.training
    linears = (m for m in model.modules() if isinstance(m, nn.Linear))
    if all(m.in_features != 3 * side**2 for m in linears):
        return None
    try:
        layer = first_layer(model.train(spec.train.mode == "train"), side, "spear")
    except AttackError:
        return None
    finally:
        model.train(mode)
    if not {layer.weight, layer.bias} <= trained:
        return None
    return model.get_parameter(layer.weight).shape[0]
