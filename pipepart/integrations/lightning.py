"""PipelineSteps: lets a module of Lightning train through a pipeline, under Lightning's automatic optimization."""

from __future__ import annotations

from typing import Any, Self

from torch import Tensor

from ..input_error import InputError
from ..pipeline import Pipeline


class PipelineSteps:
    """A mixin for a ``LightningModule``, of ``lightning`` or of ``pytorch_lightning``::

        class Classifier(PipelineSteps, LightningModule):
            def training_step(self, batch, batch_idx):
                x, y = batch
                loss = self.pipeline_step(x, target=y)
                self.log("loss", loss)
                return loss

            def configure_optimizers(self):
                return torch.optim.AdamW(self.parameters())

        trainer = Trainer(devices=1)
        trainer.fit(Classifier(pipe), loader)

    The model of the pipeline is ``self.model``, so its parameters are those of the module. Accumulation of gradients,
    clipping, precision, logging, checkpoints and callbacks are Lightning's. When :meth:`pipeline_step` returns, the
    backward has run. Lightning would clear the gradients after that: :meth:`pipeline_step` clears them instead, before
    it runs the first batch of an optimizer's step.

    In ``validation_step`` and the like call ``self.pipe(x)`` or ``self.pipe.evaluate(x, target=y)``. Copies of the
    module, in which callbacks average weights, have no pipeline.

    Args:
        pipe: the pipeline to train, in one process.
        args, kwargs: those of the classes behind this one.
    """

    trainer: Any
    pipe: Pipeline

    def __init__(self, pipe: Pipeline, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.model = pipe.module
        self.pipe = pipe

    def pipeline_step(self, *args: Any, target: Any = None, **kwargs: Any) -> Tensor:
        """Run forward and backward of a batch, as ``Pipeline.step``; return the loss for ``training_step`` to return.

        Raises:
            ValueError: Lightning runs several processes, or the module optimizes by hand.
        """
        if self.trainer.world_size > 1:
            raise InputError(
                f"Lightning runs {self.trainer.world_size} processes, each with the whole model, but the pipeline has "
                "its devices in one: write Trainer(devices=1), whatever the number of devices of the pipeline"
            )
        if not self.automatic_optimization:  # type: ignore[attr-defined]
            raise InputError(
                "pipeline_step is for automatic optimization: with automatic_optimization=False call "
                "self.pipe.step(...), and clear the gradients before it"
            )
        accumulated = self.trainer.accumulate_grad_batches
        if self.trainer.fit_loop.batch_idx % accumulated == 0:
            self.trainer.optimizers[0].zero_grad()
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        return self.pipe.step(*args, target=target, scaler=scaler, loss_weight=1 / accumulated, **kwargs)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Do nothing: :meth:`pipeline_step` has run the backward."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        """Do nothing: this is called behind :meth:`pipeline_step`, whose gradients are there."""

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, which has no pipeline."""
        return {**super().__getstate__(), "pipe": None}  # type: ignore[dict-item]

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Do nothing: the layers are on the devices of their stages."""
        return self

    def cuda(self, device: Any = None) -> Self:
        """Do nothing, as :meth:`to`."""
        return self

    def cpu(self) -> Self:
        """Do nothing, as :meth:`to`: Lightning calls it when training has ended."""
        return self
