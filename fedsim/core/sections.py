"""Sections: the parts of a spec, each a mapping of known keys with their defaults and bounds."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated, Any, Literal, assert_never

from pydantic import BaseModel, ConfigDict, Field, model_validator

from fedsim.core.lora import LORA, Lora, Trainable, wanted
from fedsim.core.losses import Loss
from fedsim.core.optimizers import Betas, OptimizerName, Schedule
from fedsim.core.precision import Precision
from fedsim.core.text import brief

Positive = Annotated[int, Field(ge=1)]
Deviation = Annotated[float, Field(gt=0)]
Colour = tuple[float, float, float]
Spread = Annotated[float, Field(gt=0)]  # something is divided by it

BASELINE = "prior_only"  # the attack that never sees the update
_BASELINE_PATHS = ("fedsim.attacks.prior_only:PriorOnly", "attacks.prior_only:PriorOnly")
_TITLE = re.compile(r"[\w .+-]{1,200}")
_TITLE_BYTES = 200  # of a folder's name, which has at most 255


class Upload(StrEnum):
    """What a client uploads. Code that tells the kinds apart covers every one (`assert_never`)."""

    GRADIENT = "gradient"  # of one batch
    DELTA = "delta"  # how the weights changed over the local steps

    @property
    def sign(self) -> float:
        """Of the upload relative to the gradient behind it: a descent step goes against that."""
        match self:
            case Upload.GRADIENT:
                return 1.0
            case Upload.DELTA:
                return -1.0
            case other:
                assert_never(other)


class Section(BaseModel):
    """A mapping of known keys."""

    # A number that is none, or endless, would be found out only by what is computed with it.
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class PartitionSpec(Section):
    """How the samples are spread over the clients (flwr-datasets' partitioners)."""

    kind: Literal["iid", "dirichlet", "pathological", "shard", "natural"] = "iid"
    alpha: Annotated[float, Field(gt=0)] = 0.5  # dirichlet: concentration
    classes_per_client: Positive = 2  # pathological
    shards_per_client: Positive = 2  # shard


class DataSpec(Section):
    """Which pictures, at which size, on how many clients."""

    name: str = "photos"
    path: str | None = None
    label: str | None = None  # what is learned, where a data set has more than one; null: its first
    image_size: Annotated[int, Field(ge=8)] = 32
    clients: Positive = 8
    partition: PartitionSpec = PartitionSpec()
    mean: Colour = (0.5, 0.5, 0.5)
    std: Annotated[
        tuple[Spread, Spread, Spread], Field(description="per channel, after scaling to [0, 1]")
    ] = (0.5, 0.5, 0.5)


class ModelSpec(Section):
    """Any timm classifier by name, or a factory of models by import path
    (``torchvision.models:vit_b_16``, ``task:Net``); ``options`` go to its constructor. ``init``
    classic: linear layers and convolutions as torch begins them, embeddings from N(0, 1), as older
    ViT code does (and the victims of APRIL's paper); timm's are far smaller."""

    name: str = "vit_tiny_patch16_224"
    options: dict[str, Any] = {}
    init: Literal["timm", "classic"] = "timm"
    pretrained: bool = False
    checkpoint: str | None = None

    @model_validator(mode="after")
    def _begins_once(self) -> ModelSpec:
        if self.init != "timm" and self.pretrained:
            raise ValueError("init: classic begins a model afresh, which pretrained: true does not")
        return self


class AugmentSpec(BaseModel):
    """A transform of torchvision's: its name, and the parameters that its constructor takes."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str


class TrainSpec(Section):
    """The federated protocol: what the server announces and every client follows."""

    rounds: Positive = 1
    clients_per_round: Positive | None = None  # null: every client
    batch_size: Positive = 1
    local_steps: Positive | None = None  # null: one, unless local_epochs says otherwise
    local_epochs: Positive | None = None
    trainable: Trainable = "all"  # words (head, norm, bias, lora) and patterns of parameters
    lora: Lora = Lora()  # the adapters, where they are trained
    accumulate: Positive = 1  # batches of batch_size behind one step
    drop_last: bool = False  # of every local epoch, a last step with less than a whole batch
    optimizer: OptimizerName = "sgd"
    lr: Annotated[float, Field(gt=0)] = 0.05
    schedule: Schedule = Schedule()  # of the learning rate over the local steps of a round
    round_schedule: Schedule = Schedule()  # and over the rounds
    betas: Betas = (0.9, 0.999)  # of adam and adamw
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    clip: Annotated[float, Field(gt=0)] | None = None  # global l2 norm of each gradient
    loss: Loss = Loss()
    augment: list[AugmentSpec] = []
    precision: Precision = "float32"  # of a forward pass (autocast); weights stay in float32
    upload: Upload = Upload.GRADIENT
    upload_dtype: Precision = "float32"
    batchnorm: Literal["shared", "local"] = "shared"
    mode: Literal["train", "eval"] = "train"
    strategy: str = "FedAvg"
    strategy_options: dict[str, Any] = {}
    timeout: Annotated[float, Field(gt=0)] = 3600.0  # seconds a cohort is waited for, at most
    # Once half of it has answered: so many times as long as that half took; null: the timeout.
    patience: Annotated[float, Field(ge=1)] | None = 10.0
    max_norm: Annotated[float, Field(gt=0)] | None = None  # of an upload; null: very far
    max_examples: Positive | None = None  # behind an upload; null: what the protocol gives
    evaluate: bool = True

    @model_validator(mode="after")
    def _trains_its_adapters(self) -> TrainSpec:
        if not wanted(self.trainable):
            raise ValueError("trainable names nothing; a client must train something")
        if self.lora != Lora() and LORA not in wanted(self.trainable):
            raise ValueError("lora says what adapters are like that nobody trains; trainable: lora")
        return self

    @model_validator(mode="after")
    def _one_way_to_count_steps(self) -> TrainSpec:
        if self.local_steps is not None and self.local_epochs is not None:
            raise ValueError("give local_steps or local_epochs, not both")
        if self.upload is Upload.GRADIENT:
            if (self.local_steps or 1) * (self.local_epochs or 1) > 1:
                raise ValueError("a gradient upload is one step; use upload: delta for several")
            if self.optimizer != "sgd" or self.momentum or self.schedule.name != "constant":
                raise ValueError("a gradient upload has no local optimizer; use upload: delta")
        return self

    @property
    def step_size(self) -> int:
        """Pictures behind one step."""
        return self.batch_size * self.accumulate

    @property
    def proximal(self) -> float:
        """How strongly the strategy asks its clients to stay near the weights they received."""
        mu = self.strategy_options.get("proximal_mu", 0.0) if self.strategy == "FedProx" else 0.0
        return float(mu) if isinstance(mu, int | float) else 0.0

    def rate(self, round_: int) -> float:
        """The learning rate with which a round begins."""
        return self.lr * self.round_schedule.share(round_ - 1, self.rounds)


class Component(BaseModel):
    """An attack or a defense: its name, and parameters that its dataclass checks."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str
    title: str | None = None

    @model_validator(mode="after")
    def _names_a_folder(self) -> Component:
        """What it is called in tables is also the folder of its results."""
        title = self.title
        if title is None:
            if self.short_name in ("", ".", "..") or set(self.short_name) & set("/\\\0"):
                raise ValueError(f"{brief(self.name)} is no name: results need a folder of it")
        elif not _is_title(title):
            raise ValueError(
                f"the title {brief(title)} is not a short one of letters, digits, spaces "
                f"and _ . + -"
            )
        elif title == BASELINE and not self.is_baseline:
            raise ValueError(f"the title '{BASELINE}' is that of the baseline; choose another")
        return self

    @property
    def short_name(self) -> str:
        """The name in tables: the title, or the name; of an import path, the class."""
        return self.title or self.name.rpartition(":")[2]

    @property
    def is_baseline(self) -> bool:
        """Whether it is the attack that never sees the update, whatever it is called."""
        return self.name == BASELINE or self.name in _BASELINE_PATHS

    @property
    def params(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


def _is_title(text: str) -> bool:
    """Whether a title can be a folder's name on any disk, and no other folder than its own."""
    safe = _TITLE.fullmatch(text) is not None and text.strip(" .+-") != ""
    return safe and len(text.encode()) <= _TITLE_BYTES


class SurrogateSpec(Section):
    """Data of the attacker's own (threat D, E and G): never the clients' shards."""

    name: str = "imagefolder"
    path: str | None = None


class PriorSpec(Section):
    """A pretrained network of the attacker's own (threat D, E and G)."""

    name: str = "efficientnet_lite0"  # from its package, offline; or any timm name, from the hub
    options: dict[str, Any] = {}
    checkpoint: str | None = None
    # How its pictures were normalised, where timm's own numbers of that name do not hold.
    mean: tuple[float, float, float] | None = None
    std: tuple[Deviation, Deviation, Deviation] | None = None


class GeneratorSpec(Section):
    """A trained generator of the attacker's own (threat D, E and G): a file that `fedsim generator
    train` or GIML wrote, or any module by import path with its safetensors file."""

    checkpoint: str
    name: str | None = None  # null: as the file says; or package.module:Class
    options: dict[str, Any] = {}  # of a class by import path


class ThreatSpec(Section):
    """What the attacker may know: a letter of the table in ``fedsim.core.knowledge``."""

    model: Literal["A", "B", "C", "D", "E", "F", "G", "H"] = "C"
    surrogate: SurrogateSpec | None = None
    prior: PriorSpec | None = None
    generator: GeneratorSpec | None = None
    withhold: list[str] = []  # fields that the letter grants and this attacker lacks
    oracle_labels: bool = False


class ServerSpec(Section):
    """What an active server does (threats F, G and H): which weights it sends, and what becomes of
    the replies to them.

    ``aggregate``: ``discard`` keeps tampered replies out of the global model, ``include`` lets them
    in, and after ``honest_copy`` the same clients are asked once more, honestly, in the next round.
    """

    manoeuvre: Component | None = None
    aggregate: Literal["discard", "include", "honest_copy"] = "discard"
    rounds: list[Positive] | None = None  # that it tampers with; null: all, or every other one
    clients: list[Annotated[int, Field(ge=0)]] | None = None  # it asks in every round (threat H)

    @model_validator(mode="after")
    def _copies_have_room(self) -> ServerSpec:
        rounds = sorted(set(self.rounds or []))
        if self.aggregate == "honest_copy" and any(r + 1 in rounds for r in rounds):
            raise ValueError("honest_copy takes the round after a tampered one: leave it free")
        if self.manoeuvre is None and (self.rounds or self.clients):
            raise ValueError("server.rounds and server.clients are of a manoeuvre: name one")
        return self


class CapturedSpec(Section):
    """Of a federation that somebody's own app ran: ``cohorts`` says whose updates were captured,
    round by round, ``examples`` how many the client with fewest says that it has."""

    cohorts: list[list[Annotated[int, Field(ge=0)]]] = []
    examples: Positive | None = None
    classes: Positive | None = None


class AuditSpec(Section):
    """Which observations are attacked, and how often."""

    rounds: list[Positive] | None = None  # null: every round
    victims: Positive | None = None  # null: every observation of those rounds
    trials: Positive = 1
    gallery: Annotated[int, Field(ge=0)] = 500  # pictures to tell a victim's own from; 0: none
    features: Literal["prior", "pixels"] = "prior"  # where its nearest neighbour is looked for


class EngineSpec(Section):
    """Where it runs."""

    kind: Literal["ray", "inline"] = "ray"
    address: str | None = None
    attack_workers: Positive = 1
    retries: Annotated[int, Field(ge=0)] = 1
    # Seconds: that a job may go without a step it reports, and that it may take in all (null: a
    # day, or ten minutes for each step it announces). After that it is ended, told and tried again.
    job_silence: Annotated[float, Field(gt=0)] = 3600.0
    job_timeout: Annotated[float, Field(gt=0)] | None = None
    device: str = "auto"
    client_gpus: Annotated[float, Field(ge=0)] = 0.0  # share of a GPU each client takes
    # Of attack workers, a share or a whole number; null: all GPUs, evenly.
    gpus_per_worker: Annotated[float, Field(ge=0)] | None = None
    cpus: Positive | None = None  # of a local Ray; null: all

    @model_validator(mode="after")
    def _gpus_as_ray_counts_them(self) -> EngineSpec:
        wanted = self.gpus_per_worker
        if wanted is not None and wanted > 1 and wanted % 1:
            raise ValueError(f"gpus_per_worker is {wanted:g}; above 1 it must be a whole number")
        return self
