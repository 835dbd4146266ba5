"""`make dist`, after the build: are the right files in the archives, and does the wheel work where nothing else is?"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
import venv
from pathlib import Path
from zipfile import ZipFile

REPOSITORY = Path(__file__).parents[1]
# Beside the package itself.
SDIST_FILES = {
    *(".gitignore", "CHANGELOG.md", "CITATION.cff", "LICENSE", "PKG-INFO", "README.md"),
    *("hatch_build.py", "lightning_bucketddp_autoload.py", "pyproject.toml"),
}
METADATA_FILES = {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE"}
PROGRAM = """
from lightning import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning_bucketddp import BucketDDPMonitor, BucketDDPStrategy

if __name__ == "__main__":
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    short = {"callbacks": [BucketDDPMonitor()], "max_steps": 20, "limit_val_batches": 0}
    trainer = Trainer(accelerator="cpu", devices=2, strategy=BucketDDPStrategy(), **short, **quiet)
    trainer.fit(BoringModel())
    assert trainer.global_step == 20
    named = Trainer(accelerator="cpu", devices=2, strategy="bucketddp", logger=False).strategy
    assert isinstance(named, BucketDDPStrategy)
"""


def package_files() -> set[str]:
    """Return the files of the package that git knows."""
    listed = subprocess.run(
        ["git", "ls-files", "lightning_bucketddp"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    return set(listed.stdout.splitlines())


def surprises_in_sdist(path: Path, package: set[str]) -> set[str]:
    """Return the files of an sdist that should not be there, and those that are missing."""
    with tarfile.open(path) as archive:
        names = {member.name.partition("/")[2] for member in archive if member.isfile()}
    return names ^ (package | SDIST_FILES)


def surprises_in_wheel(path: Path, package: set[str]) -> set[str]:
    """Return the files of a wheel that should not be there, and those that are missing."""
    metadata = "-".join(path.name.split("-")[:2]) + ".dist-info"
    expected = {"lightning_bucketddp_autoload.py", *(f"{metadata}/{name}" for name in METADATA_FILES)}
    return set(ZipFile(path).namelist()) ^ (package | expected)


def try_wheel(wheel: Path, directory: Path) -> None:
    """Install a wheel without extras in a new environment, train, and run each command, outside of the checkout."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    venv.create(directory / "venv", with_pip=True)
    program = directory / "train.py"
    program.write_text(PROGRAM)

    def run(command: str, *arguments: object) -> None:
        print("+", command, *arguments, flush=True)
        path = directory / "venv" / "bin" / command
        subprocess.run([path, *map(str, arguments)], cwd=directory, env=environment, check=True)

    quiet = ("-qq", "--no-compile", "--disable-pip-version-check")
    run("pip", "install", *quiet, "-c", REPOSITORY / "constraints.txt", wheel)
    run("pip", "check")
    run("python", program)
    run("bucketddp", "report", directory, "--output", directory / "report.html")
    run("bucketddp", "plan", "lightning.pytorch.demos.boring_classes:BoringModel", "--ranks", 2)
    run("bucketddp", "doctor")


def main() -> int:
    [sdist], [wheel] = (list((REPOSITORY / "dist").glob(pattern)) for pattern in ("*.tar.gz", "*.whl"))
    version = sdist.name.removeprefix("lightning_bucketddp-").removesuffix(".tar.gz")
    if sys.argv[1:] not in ([], [f"v{version}"]):
        print(f"The tag is {sys.argv[1]}, but the version is {version}.", file=sys.stderr)
        return 1
    package = package_files()
    if surprises := surprises_in_sdist(sdist, package) | surprises_in_wheel(wheel, package):
        print(f"Too much or too little in an archive: {', '.join(sorted(surprises))}", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as directory:
        try_wheel(wheel, Path(directory))
    print(f"\ndist/{sdist.name} and dist/{wheel.name}: valid metadata, the expected files; the wheel, which was built")
    print("from the sdist, was installed without extras in a new environment, trained in two processes, and ran")
    print("`bucketddp report`, `plan` and `doctor`.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
