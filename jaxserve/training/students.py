"""Which student learns by which algorithm."""

from __future__ import annotations

from jaxserve.core.errors import ConfigError
from jaxserve.models.loading.checkpoint import Checkpoint
from jaxserve.models.loading.mtp import count_mtp_layers, has_mtp_layers
from jaxserve.models.loading.weights import LoadedModel
from jaxserve.models.registry import registered_model_for
from jaxserve.training.head_student import DflashStudent, Eagle3Student, EagleStudent, HeadStudent
from jaxserve.training.mtp_student import MtpStudent
from jaxserve.training.packing import PackedRows, frequent_ids
from jaxserve.training.settings import TrainSettings
from jaxserve.training.student import Student

_HEADS: dict[str, type[HeadStudent]] = {"EAGLE": EagleStudent, "EAGLE3": Eagle3Student, "DFLASH": DflashStudent}


def check_target(algorithm: str, checkpoint: Checkpoint) -> None:
    """Whether drafts of this kind can be trained for the model; loads no weights.

    Raises:
        ConfigError: they are for another kind of model.
        ModelLoadError: the checkpoint's own MTP layers, where training would begin, are damaged.
    """
    wanted = _HEADS.get(algorithm, MtpStudent).target_class
    found = registered_model_for(checkpoint.model_config).model_class
    if isinstance(found, type) and issubclass(found, wanted):
        if algorithm == "MTP" and has_mtp_layers(checkpoint):
            count_mtp_layers(checkpoint)
        return
    for_mtp = isinstance(found, type) and issubclass(found, MtpStudent.target_class)
    raise ConfigError(
        f"--algorithm {algorithm.lower()} trains for {wanted.__name__} models, --model {checkpoint.path} is "
        f"{checkpoint.model_config.architecture}; give another --model"
        f"{', or --algorithm mtp, whose layers are for this one' if for_mtp else ''}"
    )


def make_student(settings: TrainSettings, checkpoint: Checkpoint, target: LoadedModel, rows: PackedRows) -> Student:
    """What is to be trained, as it begins.

    Args:
        checkpoint, target: the model's, which ``check_target`` has let pass.
        rows: to be trained on; a head learns to guess the ids that are frequent there.

    Raises:
        ConfigError, ModelLoadError: a setting, or MTP layers in the checkpoint, that cannot work.
    """
    if settings.algorithm == "MTP":
        return MtpStudent(settings, target, checkpoint)
    config = target.config
    ids = frequent_ids(rows, config.vocab_size, settings.draft_vocab_size, (*config.eos_token_ids,))
    return _HEADS[settings.algorithm](settings, target, ids)
