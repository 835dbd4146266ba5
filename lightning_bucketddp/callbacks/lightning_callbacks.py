"""The callbacks for `lightning.pytorch.Trainer`."""

from lightning.pytorch import Callback

from lightning_bucketddp.callbacks.monitor import StepMonitoring
from lightning_bucketddp.callbacks.scale_learning_rate import LearningRateScaling
from lightning_bucketddp.callbacks.scaling_monitor import ScalingMeasurement


class BucketDDPMonitor(StepMonitoring, Callback):
    __doc__ = StepMonitoring.__doc__


class ScaleLearningRate(LearningRateScaling, Callback):
    __doc__ = LearningRateScaling.__doc__


class ScalingMonitor(ScalingMeasurement, Callback):
    __doc__ = ScalingMeasurement.__doc__
