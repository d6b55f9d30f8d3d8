"""Admission: what a client's reply must be before it touches anything.

A reply is let in whole or not at all. Its form is that of the model that was announced: the trained
parameters by name, shape and type, the BatchNorm buffers where the protocol shares them, two
metrics, and not a byte more. Its numbers are finite, the examples it claims are at most those that
a client can have used, and its norm is within a bound that no training comes near and that leaves
the model finite whoever sends it. An update of the right form within these bounds may still be
made up: that is for robust strategies and the canary, not for this module.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from flwr.app import Message, RecordDict
from torch import Tensor

from fedsim.clients.shards import images_of, shards_of
from fedsim.core import wire
from fedsim.core.errors import ReplyError
from fedsim.core.learning import Update, batchnorm_buffers
from fedsim.core.observation import Public
from fedsim.core.run import Run
from fedsim.core.spec import Spec, Upload
from fedsim.defenses.applied import announced, declared, hiding

# How far one update may move the weights, in norms of the first ones: training moves them by less
# than one, noise of local differential privacy at an epsilon of .01 by some ten thousand.
REACH = 1e6
UNKNOWN = 1_000_000  # examples of an epoch, or of a step, where the server cannot count them
_COUNTED = 2**53  # the largest counter that an average of floats can hold
_LOSS = 1e6  # the largest loss behind an upload: some strategies weigh clients by powers of it
_LARGEST = float(np.finfo(np.float32).max)
_FLOATS = ("float16", "float32", "float64")


class Admitted(NamedTuple):
    """An update of the right form; ``fault`` says why its numbers must not be used."""

    update: Update
    fault: str | None = None


class Admission:
    """Who is let in, in a federation that starts from these weights.

    ``tested`` is the size of the test set where the server was told; where it has the data set it
    counts itself, and otherwise does not know (None).
    """

    def __init__(
        self,
        spec: Spec,
        run: Run,
        public: Public,
        initial: Mapping[str, Tensor],
        *,
        tested: int | None = None,
    ):
        self.spec, self.public = spec, public
        self.counts = run.classes is None  # whether the server has the data set to count in
        self.masked = hiding(declared(spec.defenses)) is not None
        self.reach = REACH * max(1.0, _norm(initial))
        self.limit, self.examples = self._limit(), self._examples()
        self.tested = self._tested(tested) if spec.train.evaluate else 0
        self.form = form_of(public)

    # -- training -------------------------------------------------------------------------------

    def train(self, message: Message) -> Admitted:
        """The update in a reply; a ReplyError where it is of another form than was agreed on."""
        update = wire.uploaded(_content(message), self.public.protocol.upload, self.form)
        if not 0 < update.num_examples <= self.examples:
            raise ReplyError(
                f"it claims {update.num_examples} examples, and a client has 1 to {self.examples}"
            )
        if not 0 <= update.loss <= _LOSS:
            raise ReplyError(f"its loss is {update.loss:.3g}, and at most {_LOSS:.0e} is taken")
        return Admitted(update, self.fault_of(update, masked=self.masked))

    def fault_of(self, update: Update, *, masked: bool = False) -> str | None:
        """Why the numbers of an update must not be used; of a masked one only the buffers tell."""
        if not masked:
            norm = _norm(update.tensors, self.limit)
            if math.isnan(norm):
                return "its numbers are not finite"
            if norm > self.limit:
                return f"its norm is {norm:.3g}, and at most {self.limit:.3g} is taken"
        return self._fault_of_buffers(update.buffers)

    def _fault_of_buffers(self, buffers: Mapping[str, Tensor]) -> str | None:
        norm = _norm({n: t for n, t in buffers.items() if t.is_floating_point()}, self.reach)
        if math.isnan(norm):
            return "its BatchNorm statistics are not finite"
        if norm > self.reach:
            return f"the norm of its BatchNorm statistics is {norm:.3g}"
        for name, tensor in buffers.items():
            least, most = _span(tensor)
            if least < 0 and (name.endswith("running_var") or not tensor.is_floating_point()):
                return f"'{name}' is below zero"
            if not tensor.is_floating_point() and most > _COUNTED:
                return f"'{name}' is {most:.3g}"
        return None

    def _limit(self) -> float:
        """The largest norm of an upload."""
        train = self.spec.train
        if train.max_norm is not None:
            return train.max_norm
        return self.reach / train.lr if train.upload is Upload.GRADIENT else self.reach

    def _examples(self) -> int:
        """The most examples that a client can have learned from in a round."""
        train = self.spec.train
        if train.max_examples is not None:
            return train.max_examples
        if any(":" in component.name for component in self.spec.defenses):
            size = UNKNOWN  # a defense from elsewhere may add to a batch
        elif train.local_epochs is None:
            size = train.step_size
        elif self.counts:
            size = max(len(shard) for shard in shards_of(self.spec.data, self.spec.seed))
        else:
            size = UNKNOWN
        return size * (train.local_epochs or train.local_steps or 1)

    # -- evaluation -----------------------------------------------------------------------------

    def evaluation(self, message: Message, parts: int) -> wire.Evaluation:
        """The evaluation in a reply, of one of ``parts`` shares of the test set."""
        result = wire.evaluation_in(_content(message))
        most = -(-self.tested // parts) if self.tested is not None else UNKNOWN
        if not 0 <= result.examples <= most:
            raise ReplyError(f"it claims {result.examples} examples, and its share has {most}")
        if not 0 <= result.loss <= _LARGEST:
            raise ReplyError(f"its loss is {result.loss}")
        if not 0 <= result.accuracy <= 1:
            raise ReplyError(f"its accuracy is {result.accuracy}")
        return result

    def _tested(self, told: int | None) -> int | None:
        """How many examples the test set has, as far as the server knows."""
        return len(images_of(self.spec.data, "test")) if self.counts else told


def fits(state: Mapping[str, Tensor], sent: Mapping[str, Tensor]) -> bool:
    """Whether an aggregate is a model like the one that was sent, in finite numbers."""
    return (
        state.keys() == sent.keys()
        and all(tensor.shape == sent[name].shape for name, tensor in state.items())
        and all(math.isfinite(end) for tensor in state.values() for end in _span(tensor))
    )


def form_of(public: Public) -> wire.Form:
    """What the clients of a federation upload: every parameter that its model trains, and the
    buffers that its protocol shares. A defense by import path may leave some of them out and change
    the type; a mask takes that away, because the sum of a cohort has no gaps."""
    model, defenses = announced(public), declared(public.defenses)
    own = any(":" in defense["name"] for defense in public.defenses)
    masked = hiding(defenses) is not None
    stored = public.protocol.upload_dtype
    types = (*(("int64",) if masked else ()), *(_FLOATS if own else ()))
    if stored != "float32":
        types = (stored, *types)
    shared = batchnorm_buffers(model) if public.protocol.batchnorm == "shared" else {}
    return wire.Form(
        {n: wire.Blank.of(p, *types) for n, p in model.named_parameters() if p.requires_grad},
        {name: wire.Blank.of(buffer) for name, buffer in shared.items()},
        partial=own and not masked,
    )


def _content(message: Message) -> RecordDict:
    if not message.has_content():
        raise ReplyError("it is empty")
    return message.content


def _norm(tensors: Mapping[str, Tensor], limit: float = 0.0) -> float:
    """The l2 norm over all tensors, not a number where one of theirs is not finite; below ``limit``
    only a bound of it, from the largest number of each, which takes a fraction of the time."""
    spans = {name: _span(tensor) for name, tensor in tensors.items()}
    peaks = {name: max(-least, most) for name, (least, most) in spans.items()}
    if not all(math.isfinite(peak) for peak in peaks.values()):
        return math.nan
    bound = math.sqrt(sum(peaks[n] * peaks[n] * t.numel() for n, t in tensors.items()))
    if bound <= limit:
        return bound
    return math.sqrt(sum(_squares(tensor) for tensor in tensors.values()))


def _span(tensor: Tensor) -> tuple[float, float]:
    """The least and the largest number; not a number where one of them is not."""
    # numpy: ten times faster than torch on many small tensors on a CPU
    tensor = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
    numbers = tensor.detach().cpu().numpy()
    return (float(numbers.min()), float(numbers.max())) if numbers.size else (0.0, 0.0)


def _squares(tensor: Tensor) -> float:
    """The sum of squares, in float64: those of float32 overflow at a number of 1e19."""
    return float(tensor.detach().double().square().sum())
