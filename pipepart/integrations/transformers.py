"""PipelineTrainer: the Trainer of transformers, with its batches trained by a pipeline."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import Trainer

from ..input_error import InputError
from ..pipeline import Pipeline
from ..ranks import under_torchrun


class PipelineTrainer(Trainer):
    """A ``transformers.Trainer`` whose training steps, evaluations and predictions go through a pipeline.

    All else is the Trainer's: accumulation of gradients, clipping, autocast, optimizers, schedulers, checkpoints,
    resuming, callbacks. What it saves are files of the model without a pipeline.

    The loss is the model's own. With ``compute_loss_func=``, or in a subclass with a ``compute_loss``, it is a function
    of the output, and the step becomes a forward through all stages followed by a backward through all stages, whatever
    the schedule of the plan.

    Args:
        pipe: the pipeline of the model to train, in one process.
        options: those of ``transformers.Trainer`` without ``model`` and ``model_init``.

    Raises:
        ValueError: label smoothing, ``torch_compile``, or several processes.
    """

    def __init__(self, pipe: Pipeline, **options: Any) -> None:
        if under_torchrun():
            raise InputError(
                "PipelineTrainer is for one process: under torchrun the Trainer makes the model of each process a "
                "replica of the others' (DistributedDataParallel). Start the script with python, or train with "
                "pipe.step in a loop"
            )
        # With a device map the Trainer leaves a model where it is: on the devices of its stages.
        model: Any = pipe.module
        model.hf_device_map = {name: str(tensor.device) for name, tensor in pipe.named_parameters()}
        try:
            super().__init__(model=model, **options)
        finally:
            del model.hf_device_map
        self.pipe = pipe
        if self.label_smoother is not None:
            raise InputError(
                "label_smoothing_factor replaces the loss that the model computes: pass compute_loss_func=... instead, "
                "a function that smooths the labels"
            )
        if self.args.torch_compile:
            raise InputError(
                "torch_compile compiles the model as a whole, which the pipeline runs stage by stage: pass "
                "compile=True to Pipeline instead"
            )

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Run forward and backward of a batch; return its loss, weighted as the Trainer weighs it."""
        if self.compute_loss_func is not None or type(self).compute_loss is not Trainer.compute_loss:
            # Differentiates the output of the pipeline.
            return super().training_step(self.pipe, inputs, num_items_in_batch)  # type: ignore[arg-type]
        self.pipe.train()
        if callable(train := getattr(self.optimizer, "train", None)):
            train()  # optimizers without a schedule keep other weights for evaluation
        inputs = self._prepare_inputs(inputs)
        counted = self.model_accepts_loss_kwargs and num_items_in_batch is not None
        if counted:
            inputs = {**inputs, "num_items_in_batch": num_items_in_batch}
        is_scaled = getattr(self, "loss_is_scaled_for_ga", None)  # None in versions before it
        weight = (
            1.0
            if (counted if is_scaled is None else is_scaled)
            else 1 / self.current_gradient_accumulation_steps
        )
        with self.compute_loss_context_manager():
            loss = self.pipe.step(**inputs, scaler=self.accelerator.scaler, loss_weight=weight)
        return loss * weight

    def prediction_step(self, model: Any, *args: Any, **options: Any) -> Any:
        """Return loss, predictions and labels of a batch."""
        return super().prediction_step(self.pipe, *args, **options)  # type: ignore[arg-type]
