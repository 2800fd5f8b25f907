"""`DPTrainer`: the Hugging Face Trainer with private steps, alone or in front of TRL's.

The Trainer keeps its loop, logging, evaluation, callbacks and schedulers. What changes: one turn
of its loop is one logical batch drawn by Poisson sampling, the loss is one number per sample, and
the optimizer only sees privatized gradients. `gradient_accumulation_steps` keeps its meaning
(logical batch = per-device batch × accumulation), but the splitting is done per logical batch,
because Poisson batches have no fixed size. Under torchrun or accelerate every process has the whole
model and a part of each logical batch, which is that of all processes together.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from shuffled_dpsgd.distributed import current_world
from shuffled_dpsgd.distributed.agreement import first_does
from shuffled_dpsgd.environment import subject_of
from shuffled_dpsgd.errors import BudgetExhaustedError, InvalidArgumentError, require
from shuffled_dpsgd.integrations import PrivacyArguments
from shuffled_dpsgd.integrations.hf_conflicts import (
    check_accelerator,
    check_deciders,
    check_model,
    check_overrides,
    check_processes,
    check_trainer_options,
    size_of_data,
)
from shuffled_dpsgd.integrations.per_sample_loss import (
    check_labels,
    head_of,
    per_sample_losses,
    unwrapped,
)
from shuffled_dpsgd.integrations.trainer_fields import settled
from shuffled_dpsgd.integrations.trainer_files import (
    LEDGER_FILE,
    UPLOADED,
    claim_ledger,
    load_private_part,
    save_private_part,
    write_card_files,
)
from shuffled_dpsgd.integrations.trainer_parts import (
    SteppedOptimizer,
    StopWhenSpent,
    spending_of_step,
    with_lengths,
)
from shuffled_dpsgd.options import PrivacyOptions, options_in
from shuffled_dpsgd.runtime.attention import without_cudnn_attention
from shuffled_dpsgd.runtime.notices import warn_caller
from shuffled_dpsgd.training import PrivacyCard, PrivateTraining, SpendingCurve, assemble
from shuffled_dpsgd.training.drawn_batches import BatchStream
from shuffled_dpsgd.training.kinds import check_adapters
from shuffled_dpsgd.training.planning import large_delta
from shuffled_dpsgd.training.units import Units, units_of

LossFunction = Callable[[Any, torch.Tensor], torch.Tensor]


class DPTrainer(Trainer):
    """A `Trainer` whose `train()` is differentially private under a plan made from `privacy`.

    `per_sample_loss(outputs, labels)` replaces the loss chosen by the model's head; it must return
    one loss per sample, each depending on that sample only. Evaluation and prediction are the
    Trainer's own and see no private data unless the user evaluates on it. `data_name` is what the
    privacy card calls the training data. `dataloader_num_workers` processes load them.
    """

    # Modules of trainers behind this one whose loss `per_sample_losses` computes for each record.
    replaces: tuple[str, ...] = ()

    def __init__(
        self,
        model: nn.Module | str | None = None,
        args: TrainingArguments | None = None,
        *,
        privacy: PrivacyArguments,
        per_sample_loss: LossFunction | None = None,
        data_name: str | None = None,
        **options: Any,
    ) -> None:
        require(model is not None, "model", "a model, or its name", None)
        args = args or self._usual_args(model)
        self._expected_batch_size = privacy.expected_batch_size or (
            args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
        )
        args = settled(args)
        # The logical batch is split here, not by the Trainer; the caller's arguments stay as given.
        args.gradient_accumulation_steps = 1
        check_processes(args)
        check_trainer_options(options)
        check_overrides(self, DPTrainer, self.replaces)
        self.privacy = privacy
        self.private: PrivateTraining | None = None
        self._per_sample_loss = per_sample_loss
        self._check_model(model)
        self._data_name = data_name
        self._loaded_by_workers: BatchStream | None = None
        self._resuming = False
        super().__init__(model=model, args=args, **options)
        if self.model is not model:
            # TRL's trainer has loaded it, or wrapped it in adapters.
            self._check_model(self.model)
        check_accelerator(self.accelerator)
        # Evaluation mode leaves the model as it is: wrapped, its gradients would be averaged over
        # the processes before anything is clipped.
        self.accelerator.prepare_model = functools.partial(
            self.accelerator.prepare_model, evaluation_mode=True
        )
        self.add_callback(StopWhenSpent(lambda: self.private))

    def card(self) -> PrivacyCard:
        """What may be claimed about everything released so far, and about which model."""
        known: Any = getattr(self.model, "config", None)
        model = getattr(known, "name_or_path", "") or type(self.model).__name__
        data = self._data_name or type(self.train_dataset).__name__
        return self._started().card().about(**subject_of(model, data, self._released_weights()))

    @without_cudnn_attention()
    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> Any:
        """Train to the end of the plan, then write the privacy card beside the model.

        A run that a callback ends early is released as it is, and cannot be continued.
        """
        if self.private is not None:
            raise BudgetExhaustedError(
                "this trainer has trained already; another run spends privacy of its own: "
                "make a new trainer with a new output_dir"
            )
        data = self.eval_dataset
        heldout = data if isinstance(data, dict) else {} if data is None else {"": data}
        check_deciders(
            self.args,
            self.callback_handler.callbacks,
            self._taken_by_model(self.train_dataset),
            {name: self._taken_by_model(part) for name, part in heldout.items()},
        )
        self._resuming = bool(resume_from_checkpoint)
        output = super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)
        private = self._started()
        with self._calling_model():
            if self._loaded_by_workers is not None:
                self._loaded_by_workers.close()
            private.release()
            private.close()
        self._write_card()
        return output

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: every trial is a release of its own that no claim here would count."""
        raise InvalidArgumentError(
            "hyperparameter_search",
            expected="one plan per trainer",
            got="a search",
            remedy="search on public data, or account for every trial",
        )

    # -- what the Trainer's loop calls ---------------------------------------------------------

    def get_train_dataloader(self) -> Any:
        """One empty item per logical batch: the records are drawn inside `training_step`."""
        numbers = range(self._steps_per_epoch())
        return DataLoader(numbers, batch_size=1, collate_fn=_nothing)  # type: ignore[arg-type]

    def num_examples(self, dataloader: Any) -> int:
        """Number of records; the training loader itself only counts steps."""
        if isinstance(dataloader.dataset, range):
            return size_of_data(self.train_dataset)
        return int(super().num_examples(dataloader))

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """The expected size of a logical batch."""
        return self._expected_batch_size

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        """The Trainer's own optimizer, made private; steps happen in `training_step`."""
        if self.private is None:
            optimizer = super().create_optimizer(model)
            self.private = self._make_private(optimizer)
            self.optimizer = SteppedOptimizer(optimizer)
        return self.optimizer

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """One logical batch: forward, per-sample clip, noise, update, shuffle."""
        private = self._started()
        model.train()
        with self._calling_model():
            for batch in self._batches_of_one_step(private):
                prepared = self._prepare_inputs(batch)
                private.backward(self._losses_of_batch(model, prepared))
                private.step()
                self.current_flos += float(super().floating_point_ops(prepared))
        assert private.last_metrics is not None
        return torch.tensor(private.last_metrics.loss or 0.0, device=self.args.device)

    def _batches_of_one_step(self, private: PrivateTraining) -> Iterator[Any]:
        data, collate = self._training_data
        options: dict[str, Any] = {"collate": collate, "pad_batches": private.pads_by_default}
        number = self.args.dataloader_num_workers
        if number == 0:
            return private.batches(data, num_steps=1, **options)
        if self._loaded_by_workers is None:
            # One stream for the whole plan: a stream for each step would start its workers anew.
            self._loaded_by_workers = private.batches(data, num_workers=number, **options)
        return self._loaded_by_workers.of_next_step()

    def per_sample_losses(self, model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        """One loss per sample; the labels never reach the model, whose own loss is a mean."""
        inputs = dict(inputs)
        require(
            "labels" in inputs,
            "labels",
            "a `labels` entry in every batch",
            sorted(inputs),
            "labels of classes must be numbers, as collators drop texts; for a language model, "
            "DataCollatorForLanguageModeling(tokenizer, mlm=False) adds labels",
        )
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        if self._per_sample_loss is not None:
            return self._per_sample_loss(outputs, labels)
        return per_sample_losses(model, outputs, labels, self.args.label_smoothing_factor)

    def floating_point_ops(self, inputs: Any) -> int:
        """Counted batch by batch in `training_step`; the loop's own items are empty."""
        return super().floating_point_ops(inputs) if inputs else 0

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add what was spent, with its kind in the name, and drop the norm of a noised gradient."""
        private = self.private
        if "loss" in logs and private is not None and private.last_metrics is not None:
            logs = {key: value for key, value in logs.items() if key != "grad_norm"}
            logs |= spending_of_step(private, self._spending)
        super().log(logs, start_time)

    # -- saving and resuming -------------------------------------------------------------------

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        # The Trainer has saved the weights beside it.
        extras, only_model = {"scheduler": self.lr_scheduler}, self.args.save_only_model
        save_private_part(self._started(), output_dir, extras=extras, only_model=only_model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            extras = {"scheduler": self.lr_scheduler}
            load_private_part(self._started(), checkpoint, extras=extras)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """The Trainer's model card with the privacy section and no scores, which have no noise."""
        logged, self.state.log_history = self.state.log_history, []
        try:
            super().create_model_card(*args, **kwargs)
        finally:
            self.state.log_history = logged
        if self.private is not None:
            self._write_card()

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's own, of a folder that holds the saved model and its card alone."""
        with self._uploading():
            return super().push_to_hub(*args, **kwargs)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        with self._uploading():
            super()._push_from_checkpoint(checkpoint_folder)

    @contextmanager
    def _uploading(self) -> Iterator[None]:
        """Upload from a folder of its own, so that logs and scores in `output_dir` stay private."""
        kept = self.args.output_dir
        folder = Path(kept) / UPLOADED / Path(kept).absolute().name
        folder.mkdir(parents=True, exist_ok=True)
        self.args.output_dir = str(folder)
        try:
            yield
        finally:
            self.args.output_dir = kept

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """The Trainer's own; after `train()` the card in `output_dir` names the weights saved.

        Weights that were changed after `train()` are refused: the card is not about them.
        """
        if self.private is not None:
            self.private.claims.check_released()
        super().save_model(output_dir, _internal_call)
        private, target = self.private, Path(output_dir or self.args.output_dir)
        if private is not None and private.released and target == Path(self.args.output_dir):
            self._write_card()

    def _released_weights(self) -> Path:
        """Where the weights of the finished run were saved; before that, where none are."""
        private, folder = self._started(), Path(self.args.output_dir)
        return folder if private.released else folder / "nothing-released-yet"

    def _write_card(self) -> None:
        if self._started().world.leads:
            write_card_files(Path(self.args.output_dir), self.card())

    # -- parts ---------------------------------------------------------------------------------

    def _usual_args(self, model: Any) -> TrainingArguments:
        """What the Trainer behind this one would take for arguments where none are given."""
        return TrainingArguments("tmp_trainer")

    def _check_model(self, model: Any) -> None:
        if isinstance(model, nn.Module):
            check_model(model)
            check_adapters(model)
            if self._per_sample_loss is None:
                head_of(model)

    def _make_private(self, optimizer: torch.optim.Optimizer) -> PrivateTraining:
        args = self.args
        ledger = Path(args.output_dir) / LEDGER_FILE
        first_does(current_world(), lambda: claim_ledger(ledger, resuming=self._resuming))
        steps = args.max_steps
        if steps <= 0:
            steps = math.ceil(args.num_train_epochs * self._steps_per_epoch())
        size = self._num_drawn_from()
        require(
            self._expected_batch_size <= size,
            "expected_batch_size",
            f"at most {size}, the size of the training data",
            self._expected_batch_size,
            "it is per_device_train_batch_size times gradient_accumulation_steps times processes, "
            "unless PrivacyArguments sets it",
        )
        given = options_in(self.privacy) | {
            "dataset_size": size,
            "expected_batch_size": self._expected_batch_size,
            "num_steps": steps,
            "seed": self.privacy.noise_seed,
            "physical_batch_size": args.per_device_train_batch_size,
            "ledger_path": ledger,
        }
        private = assemble(self.model, optimizer, PrivacyOptions(**given))
        # The model may not take the column that names them.
        private.units = self._units
        warning = large_delta(private.plan)
        if warning is not None:
            warn_caller(warning)
        private.use_loss(self._losses_of_batch, is_trained_on=True)
        return private

    @functools.cached_property
    def _units(self) -> Units | None:
        """Whose the records are, by the column that `privacy` names."""
        if self.privacy.records_per_unit is None:
            return None
        return units_of(self.train_dataset, self.privacy.unit)

    def _num_drawn_from(self) -> int:
        """How many records, or units of several, a batch is drawn from."""
        return size_of_data(self.train_dataset) if self._units is None else len(self._units)

    def _losses_of_batch(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """The losses as `training_step` computes them.

        accelerate casts inside the model's forward alone. Cast from outside as well, everything
        that looks at the call sees in which precision it runs.
        """
        with self.compute_loss_context_manager(), self.accelerator.autocast():
            return self.per_sample_losses(model, self._prepare_inputs(batch))

    def _started(self) -> PrivateTraining:
        if self.private is None:
            raise InvalidArgumentError(
                "card", expected="a call of train() first", got="no private run yet"
            )
        return self.private

    def _taken_by_model(self, data: Any) -> Any:
        if not hasattr(data, "column_names"):
            return data
        return self._remove_unused_columns(data, description="training")

    def _steps_per_epoch(self) -> int:
        return math.ceil(self._num_drawn_from() / self._expected_batch_size)

    @functools.cached_property
    def _training_data(self) -> tuple[Any, Callable[[list[Any]], Any]]:
        """Data and collator, without the columns that the model does not take."""
        data, collate = self._taken_by_model(self.train_dataset), self._collator()
        if not hasattr(data, "column_names"):
            collate = self._get_collator_with_removed_columns(collate, "training")
        if self._per_sample_loss is None and head_of(self.model) == "classification":
            config: Any = unwrapped(self.model).config
            if config.num_labels > 1:  # one logit is a regression
                check_labels(_labels_of(self.train_dataset), config.num_labels)
        return data, with_lengths(collate, self.processing_class)

    @functools.cached_property
    def _spending(self) -> SpendingCurve:
        return SpendingCurve(self._started().plan)

    def _calling_model(self) -> AbstractContextManager[None]:
        """Entered wherever the private run calls the model."""
        return nullcontext()

    def _collator(self) -> Callable[[list[Any]], Any]:
        """What makes a batch in which every tensor has one row for each record."""
        return self.data_collator


class ShuffledDPTrainer(DPTrainer):
    """The paper's method: weights are shuffled after every step, or the model is refused."""

    def __init__(self, *args: Any, privacy: PrivacyArguments, **options: Any) -> None:
        if str(privacy.shuffle) == "auto":
            privacy = dataclasses.replace(privacy, shuffle="every-step")
        super().__init__(*args, privacy=privacy, **options)


def _labels_of(data: Any) -> Sequence[Any]:
    """The labels of all rows where they can be had without loading the rest of them."""
    names = getattr(data, "column_names", ())
    for name in ("labels", "label"):
        if name in names:
            return list(data[name])
    rows = data if isinstance(data, list) else ()
    return [row.get("labels", row.get("label")) for row in rows if isinstance(row, dict)]


def _nothing(_: list[int]) -> dict[str, Any]:
    return {}
