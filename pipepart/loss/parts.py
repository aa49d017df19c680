"""How much each micro-batch's loss weighs in the loss of its mini-batch.

The loss of a step and its gradient are those of the whole mini-batch, and the first backward starts before the last
forward: so all weights are found before, from the targets. One of torch's own losses says what it is a mean of. Any
other function is looked into: the means and sums in it each get a weight of their own, and one micro-batch is halved to
see that they add up. What cannot be seen in it must be a mean or a sum over samples, by the same test. From then on it
is followed: it is looked into again in steps 2, 4, 8 and so on, and wherever it makes other calls than it did.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..data.split import Apart
from .asking import ask_for_count, ask_for_pair
from .calls import Diverged, Kind, Record
from .counting import count_targets_of, weighs_as_a_whole
from .follow import Followed
from .memory import Known, Memory, form_of, kind_of
from .observe import Halves, Rule
from .pair import is_pair, number
from .reduction import Reduction, declared_reduction, title
from .scalar import check_scalar
from .survey import survey
from .terms import part
from .valueless import shaped

LossFunction = Callable[..., Any]
_NOTHING = Record()


class StepLoss:
    """The loss of a pipeline's steps, and what has been found out about it.

    Args:
        loss_fn: the loss; None where the model computes it, which is then taken for a mean over samples.
        reduction: how it sums up; None to take its own word or to find out.

    Raises:
        ValueError: it states that it does not reduce.
    """

    def __init__(self, loss_fn: LossFunction | None, reduction: Reduction | None = None) -> None:
        declared = reduction or declared_reduction(loss_fn)
        self.function = loss_fn
        self.declared = declared is not None
        self.summed = declared is Reduction.SUM
        self.torchs_own = loss_fn is None or weighs_as_a_whole(loss_fn)
        self.rule: Rule | None = None
        self.unfollowed = (
            False  # a mean, in the user's word, that does otherwise on values than it did without
        )
        self.memory = Memory()
        self._steps = 0

    def parts(self, target: Any, targets: Sequence[Any], sizes: Sequence[int]) -> LossParts:
        """The losses of the micro-batches of a step.

        Args:
            target: of the mini-batch.
            targets: of each micro-batch.
            sizes: samples in each micro-batch.
        """
        doubted = self._steps % len(sizes)
        self._steps += 1
        anew = self._steps & (self._steps - 1) == 0  # steps 1, 2, 4, 8, 16 and so on
        return LossParts(self, target, targets, sizes, doubted, anew)


class LossParts:
    """The losses of the micro-batches of one mini-batch, as :class:`StepLoss` makes it."""

    def __init__(
        self,
        loss: StepLoss,
        target: Any,
        targets: Sequence[Any],
        sizes: Sequence[int],
        doubted: int,
        anew: bool,
    ) -> None:
        self._loss = loss
        self._target = target
        self._targets = targets
        self._sizes = sizes
        self._samples = sum(sizes)
        self._doubted = doubted
        self._anew = anew
        self._shares: list[float] = []
        self._counts: dict[int, float] = {}
        self._expected: dict[int, float] = {}
        self._gives_pairs = False
        self._whole: Record | None = None
        self._dimension = 0

    def of(self, micro_batch: int, output: Any, target: Any) -> tuple[Tensor, float | None]:
        """The loss of a micro-batch and its weight; without one, :meth:`weight` knows it later.

        Args:
            micro_batch: which.
            output: of the model.
            target: of the micro-batch, on the output's device.

        Raises:
            ValueError: the loss is no scalar, or cannot be put together from those of micro-batches.
        """
        loss_fn = self._loss.function
        if loss_fn is None:
            what = "the model computes no scalar loss of its own and no loss_fn is given: its output"
            return self._taken(micro_batch, output, what)
        call = partial(_call, loss_fn, target)
        if self._loss.summed or self._loss.torchs_own or self._loss.unfollowed or len(self._sizes) == 1:
            return self._taken(micro_batch, call(output))
        if self._gives_pairs:
            return self._taken(micro_batch, call(output))
        training = loss_fn.training if isinstance(loss_fn, nn.Module) else None
        kind = kind_of(output, target, self._target), tuple(self._sizes), training
        known = self._loss.memory.of(kind)
        if known is not None and not (self._anew and micro_batch == self._doubted):
            found = self._follow(micro_batch, call, output, known)
            if found is not None:
                return found
            self._loss.memory.forget(kind)
        return self._look_into(micro_batch, call, output, target, kind)

    def _follow(
        self, micro_batch: int, call: Callable[[Any], Any], output: Any, known: Known
    ) -> tuple[Tensor, float] | None:
        """The loss and its weight by what is known of its kind; None where it is no longer what it was."""
        self._dimension = known.dimension
        if self._whole is None and not self._anew:
            self._whole = known.whole.for_target(self._target)
        if self._whole is None:
            self._whole = self._look(output, self._sizes[micro_batch], self._samples, self._target)
        try:
            if known.rule is Rule.TERMS:
                if not self._whole.agrees_with(known.own):
                    raise Diverged
                value, weight, _ = part(call, output, known.own, self._whole, len(self._sizes), known.calls)
                return check_scalar(value), weight
            with Followed(_NOTHING, _NOTHING, len(self._sizes), scaled=True, calls=known.calls) as followed:
                value = call(output)
            followed.finish()
        except Diverged:
            self._whole = None
            return None
        return check_scalar(value), self._share(micro_batch) if known.rule is Rule.MEAN else 1.0

    def _look_into(
        self, micro_batch: int, call: Callable[[Any], Any], output: Any, target: Any, kind: Any
    ) -> tuple[Tensor, float | None]:
        """The loss and its weight, found out by looking into it."""
        own = self._survey(micro_batch, output)
        if self._whole is None:
            return self._taken(micro_batch, call(output))
        agrees = own.agrees_with(self._whole)
        lasts = own.lasts and self._whole.complete and not self._whole.opaque
        by_shapes = lasts and not self._whole.by_values
        followed = Followed(_NOTHING, _NOTHING, len(self._sizes), scaled=True)
        value = None
        if not agrees:
            with followed if by_shapes else nullcontext():
                value = call(output)
            if is_pair(value):
                return self._taken(micro_batch, value)
        rule = self._rule(micro_batch, output, target, own, agrees)
        if rule is Rule.TERMS:
            try:
                loss, weight, followed = self._by_terms(call, output, own)
            except Diverged:
                if not self._loss.declared:
                    name = title(self._loss.function)
                    what = f"the loss {name} calls other functions of torch from time to time, so that the means in it"
                    raise ValueError(ask_for_pair(f"{what} cannot be weighed")) from None
                self._loss.unfollowed = True
                return self._taken(micro_batch, call(output))
        else:
            if not self._loss.declared:
                self._check_seen(rule, micro_batch, own)
            if value is None:
                with followed if by_shapes else nullcontext():
                    value = call(output)
            loss, weight = value, self._share(micro_batch) if rule is Rule.MEAN else 1.0
        if by_shapes or (lasts and rule is Rule.TERMS):
            self._loss.memory.keep(kind, Known(rule, own, self._whole, followed.calls, self._dimension))
        return check_scalar(loss), weight

    def weight(self, micro_batch: int) -> float:
        """The weight of a micro-batch whose loss came as a sum and a count.

        Raises:
            ValueError: the counts of other micro-batches are not known yet.
        """
        counts = {**self._expected, **self._counts}
        missing = len(self._sizes) - len(counts)
        if missing:
            of = "the model" if self._loss.function is None else f"the loss {title(self._loss.function)}"
            raise ValueError(ask_for_count(of, missing, len(self._sizes)))
        total = sum(counts.values())
        return 1 / total if total else float("inf")

    def share_of_samples(self, micro_batch: int) -> float:
        """What part of the mini-batch's samples are the micro-batch's."""
        return self._sizes[micro_batch] / self._samples

    def _taken(self, micro_batch: int, value: Any, what: str = "the loss") -> tuple[Tensor, float | None]:
        """A loss that is weighed as a whole."""
        if not is_pair(value):
            loss = check_scalar(value, what)
            return loss, 1.0 if self._loss.summed or len(self._sizes) == 1 else self._share(micro_batch)
        loss, count = value
        self._counts[micro_batch] = number(count)
        expected = self._expected.get(micro_batch, self._counts[micro_batch])
        if expected != self._counts[micro_batch]:
            raise ValueError(
                f"the loss {title(self._loss.function)} returned (sum, count) with count "
                f"{self._counts[micro_batch]:g} for micro-batch {micro_batch}, and {expected:g} when it was asked "
                "before: the count must depend on the target alone"
            )
        known = len({**self._expected, **self._counts}) == len(self._sizes)
        return loss, self.weight(micro_batch) if known else None

    def _share(self, micro_batch: int) -> float:
        """What part of a mean a micro-batch makes up."""
        if not self._shares:
            counts: Sequence[float] = self._sizes
            if self._loss.function is not None and self._loss.torchs_own:
                counted = [count_targets_of(self._loss.function, target) for target in self._targets]
                counts = [count for count in counted if count is not None] or counts
            total = sum(counts)
            self._shares = [count / total if total else 1 / len(counts) for count in counts]
        return self._shares[micro_batch]

    def _survey(self, micro_batch: int, output: Any) -> Record:
        """What is seen of the loss for a micro-batch; for the first one, for the whole mini-batch as well."""
        samples = self._sizes[micro_batch]
        look = partial(self._look, output, samples)
        if self._whole is None and not self._expected:
            own = look(samples, self._targets[micro_batch])
            if own.pair:
                self._gives_pairs = True
                self._expect_counts(micro_batch, look, own)
                return own
            if isinstance(self._target, Apart):
                if self._loss.declared:
                    return own
                name = title(self._loss.function)
                what = f"the loss {name} cannot be tried on the whole mini-batch, whose parts differ in shape"
                raise ValueError(ask_for_pair(what))
            self._whole = look(self._samples, self._target)
            if not self._whole.adds_up and _has_extent(output, 1, samples):
                self._dimension = 1
                self._whole = look(self._samples, self._target)
                if not self._whole.adds_up:
                    self._dimension = 0
        return look(samples, self._targets[micro_batch], self._whole)

    def _expect_counts(self, micro_batch: int, look: Callable[..., Record], own: Record) -> None:
        """Finds the counts of all micro-batches, as the tape of one of them gives them or else by a look."""
        seen = kind_of(self._targets[micro_batch])
        for index, (size, target) in enumerate(zip(self._sizes, self._targets, strict=True)):
            count = own.count_for(target) if kind_of(target) == seen else None
            count = look(size, target).count if count is None else count
            if count is not None:
                self._expected[index] = count

    def _look(
        self, output: Any, samples: int, wanted: int, target: Any, whole: Record | None = None
    ) -> Record:
        """What is seen of the loss for an output as this one, of another number of samples."""
        assert self._loss.function is not None
        valueless = shaped(output, samples, wanted, self._dimension)
        return survey(self._loss.function, valueless, target, wanted, whole)

    def _rule(self, micro_batch: int, output: Any, target: Any, own: Record, agrees: bool) -> Rule:
        """How the loss sums up: what is known, tried on one micro-batch a step and wherever it may not hold.

        Where the user calls it a mean, sums in it are divided by something. Only what the target says needs a trial.
        """
        if self._loss.declared:
            has_sums = any(term.kind is Kind.SUM for term in own.terms)
            if not agrees or (has_sums and not own.replaced):
                return Rule.MEAN
            if not has_sums:
                return Rule.TERMS
        known = self._loss.rule
        lost = known is Rule.TERMS and not agrees
        new = self._loss.memory.is_new(form_of(output, target))
        if known is not None and not lost and not new and micro_batch != self._doubted:
            return known
        found = self._observed(micro_batch, output, target, agrees and known in (None, Rule.TERMS))
        if known is None or lost:
            self._loss.rule = known or found
            return found or (Rule.TERMS if agrees else Rule.MEAN)
        if found not in (None, known):
            raise ValueError(
                ask_for_pair(
                    f"the loss {title(self._loss.function)} is a {known} over the samples of one micro-batch and a "
                    f"{found} over those of micro-batch {micro_batch}"
                )
            )
        return known

    def _observed(self, micro_batch: int, output: Any, target: Any, terms: bool) -> Rule | None:
        """How the loss sums up the samples of one micro-batch.

        Raises:
            ValueError: in no known way, and the user has not said how.
        """
        function, samples = self._loss.function, self._sizes[micro_batch]
        assert function is not None
        halves = Halves(function, output, target, samples, self._dimension)
        try:
            return halves.rule(terms)
        except LookupError:
            if self._loss.declared:
                return Rule.MEAN
        whole, first, second = halves.values
        raise ValueError(
            ask_for_pair(
                f"the loss {title(function)} is neither a mean nor a sum over samples: it is {whole:.6g} for "
                f"{halves.samples} samples, {first:.6g} and {second:.6g} for their two halves, so the losses of "
                "micro-batches do not add up to that of the mini-batch"
            )
        )

    def _by_terms(self, call: Callable[[Any], Any], output: Any, own: Record) -> tuple[Any, float, Followed]:
        assert self._whole is not None
        return part(call, output, own, self._whole, len(self._sizes))

    def _check_seen(self, rule: Rule, micro_batch: int, own: Record) -> None:
        """What was seen in a loss must not contradict a rule that holds for the samples of one micro-batch.

        Raises:
            ValueError: a mean in it is over what is not spread evenly over samples, such as targets not ignored.
        """
        whole, share = self._whole, self.share_of_samples(micro_batch)
        assert whole is not None
        ratios = own.ratios if own.names == whole.names[: len(own.names)] else []
        pairs = zip(own.terms, whole.terms, strict=False)
        means = [(term.count, total.count) for term, total in pairs if term.kind is Kind.MEAN]
        ratios = ratios + [count / total for count, total in means if total]
        allowed = (1.0, share) if rule is Rule.MEAN else (1.0,)
        for ratio in ratios:
            if not any(math.isclose(ratio, one, rel_tol=1e-6) for one in allowed):
                raise ValueError(
                    ask_for_pair(
                        f"the loss {title(self._loss.function)} looks like a {rule} over samples, but it counts "
                        f"{ratio:.4g} of what it counts of the mini-batch in micro-batch {micro_batch}, which has "
                        f"{share:.4g} of the samples"
                    )
                )


def _call(loss_fn: LossFunction, target: Any, output: Any) -> Any:
    return loss_fn(output) if target is None else loss_fn(output, target)


def _has_extent(output: Any, dimension: int, extent: int) -> bool:
    tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
    return any(tensor.dim() > dimension and tensor.shape[dimension] == extent for tensor in tensors)
