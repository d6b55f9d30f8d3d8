"""What a spec's way of training means for what it gives away."""

from __future__ import annotations

from collections.abc import Iterator

from fedsim.core.augment import mixes
from fedsim.core.lora import wanted
from fedsim.core.spec import Upload
from fedsim.core.text import listed
from fedsim.lint.facts import Facts
from fedsim.lint.findings import Finding

NAMES = {
    "augmented": "what augmentation changes of what leaks",
    "idle-proximal": "a proximal term that never acts",
    "partial-training": "what a trained part of the model leaves to read",
}


def augmented(facts: Facts) -> Iterator[Finding]:
    """A view of a picture leaks as the picture itself would."""
    transforms = [one.model_dump() for one in facts.spec.train.augment]
    if not transforms:
        return
    names = ", ".join(one["name"] for one in transforms)
    alone = mixes(transforms) and facts.spec.train.step_size == 1
    more = " A batch of one is mixed with itself: that hides nothing." if alone else ""
    reason = (
        f"Clients augment their pictures ({names}): what comes back is a picture as the model saw "
        f"it, and a crop or a mirrored face is still its owner's. Reports score it against the "
        f"original as well.{more}"
    )
    yield Finding("augmented", "note", reason)


def idle_proximal(facts: Facts) -> Iterator[Finding]:
    """The weights are those of the server at the first step: there is nothing to pull back."""
    train = facts.spec.train
    once = train.upload is Upload.GRADIENT or facts.steps == 1
    if train.proximal and once:
        reason = (
            "FedProx's term is zero at the first step, and clients take no other: they train as "
            "under FedAvg."
        )
        yield Finding(
            "idle-proximal", "note", reason, ("train.upload=delta", "train.local_steps=5")
        )


def _plain_gradient(facts: Facts) -> bool:
    """Whether what is uploaded is a gradient, but for a factor: nothing stands between it and the
    equations of the head."""
    train = facts.spec.train
    plain = train.upload is Upload.GRADIENT or (train.optimizer == "sgd" and not train.weight_decay)
    return plain and facts.steps == 1 and "bias" in facts.head and not facts.defenses


def partial_training(facts: Facts) -> Iterator[Finding]:
    """What clients do not train they do not upload; what the rest tells."""
    words = wanted(facts.spec.train.trainable)
    if words == ("all",):
        return
    share = facts.trained / max(1, facts.parameters)
    reason = (
        f"Clients train {listed(words)} ({share:.1%} of the model's numbers), and upload "
        f"nothing else: attacks have that alone."
    )
    if facts.adapted:
        reason += (
            " Adapters show products of the gradients of the layers they are on: more of them "
            "after the first round, which moves them from zero."
        )
    if "weight" in facts.head:
        whose = "of a batch, as far as classes go"
        if facts.one_image:
            whose = "of one picture" + (" exactly" if _plain_gradient(facts) else ", or near to it")
        reason += (
            f" The head is among it: labels, and the features that the head reads {whose} "
            f"(the attack `features`)."
        )
    yield Finding("partial-training", "note", reason)
