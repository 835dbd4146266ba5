"""A command line and YAML for the model and the data of `digits_model.py`, by LightningCLI.

cd examples/cli
python train.py fit --config config.yaml
python train.py fit --config config.yaml --trainer.strategy.init_args.bucket_cap_mb=50 --model.width=128
python train.py fit --config config.yaml --trainer.strategy=bucketddp
python train.py fit --help
"""

from digits_model import DigitClassifier, DigitsData
from lightning.pytorch.cli import LightningCLI

if __name__ == "__main__":
    LightningCLI(DigitClassifier, DigitsData, seed_everything_default=0)
