"""A notebook: its kernel forks the ranks, which know what its cells define, and gets the trained weights back."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import start_new_kernel

from tests.support.programs import SCRIPTS, STRATEGY_MODULE_OF, TIMEOUT_S, no_process_left

WEIGHTS = "[value.tolist() for value in module.layer.state_dict().values()]"


class Notebook:
    """A kernel that runs cells."""

    def __init__(self, client: BlockingKernelClient) -> None:
        self._client = client
        self.output = ""

    def run(self, cell: str, *, then: str = "None") -> Any:
        """Run `cell`; the value of `then` after it."""
        reply = self._client.execute_interactive(
            cell, user_expressions={"then": then}, output_hook=self._keep_output, timeout=TIMEOUT_S
        )["content"]
        assert reply["status"] == "ok", "\n".join(reply["traceback"])
        assert reply["user_expressions"]["then"]["status"] == "ok", reply
        return ast.literal_eval(reply["user_expressions"]["then"]["data"]["text/plain"])

    def fit(self, strategy: str) -> Any:
        """Fit a new module in one cell and read its weights in the next."""
        self.run(f"trainer = make_trainer({strategy!r})\nmodule = Regression()\ntrainer.fit(module)")
        return self.run("", then=WEIGHTS)

    def _keep_output(self, message: dict[str, Any]) -> None:
        self.output += message["content"].get("text", "")


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    own_settings = {"IPYTHONDIR": str(tmp_path_factory.mktemp("ipython"))}
    with no_process_left() as variables:
        manager, client = start_new_kernel(env={**os.environ, **variables, **own_settings})
        try:
            notebook = Notebook(client)
            for cell in (SCRIPTS / "cells.py").read_text().split("# %%"):
                notebook.run(cell)
            yield notebook
        finally:
            client.stop_channels()
            manager.shutdown_kernel()


@pytest.fixture(scope="module")
def ddp_weights(notebook: Notebook) -> Any:
    return notebook.fit("ddp_notebook")


@pytest.mark.parametrize("strategy", ["bucketddp", "bucketddp_notebook"])
def test_a_kernel_forks_the_ranks_and_has_the_weights_that_ddp_gives(
    strategy: str, notebook: Notebook, ddp_weights: Any
) -> None:
    assert notebook.fit(strategy) == ddp_weights
    assert notebook.run("", then="type(trainer.strategy).__module__") == STRATEGY_MODULE_OF["lightning.pytorch"]
    kernel, *ranks = notebook.run("", then="[os.getpid(), *module.pids.tolist()]")
    assert len({kernel, *ranks}) == 3


def test_a_kernel_trains_a_module_further(notebook: Notebook, ddp_weights: Any) -> None:
    again = "trainer = make_trainer({!r})\ntrainer.fit(module)"
    notebook.fit("bucketddp")
    further = notebook.run(again.format("bucketddp"), then=WEIGHTS)
    assert further != ddp_weights
    notebook.fit("ddp_notebook")
    assert notebook.run(again.format("ddp_notebook"), then=WEIGHTS) == further


def test_a_kernel_launches_a_function_of_a_cell_with_fabric(notebook: Notebook) -> None:
    weights = [
        notebook.run(f"trained = make_fabric({strategy!r}).launch(train)", then="trained")
        for strategy in ("bucketddp", "bucketddp_notebook", "ddp_notebook")
    ]
    assert weights[0] == weights[1] == weights[2]


def test_a_kernel_is_told_that_its_ranks_are_forked_and_shows_what_they_have_recorded(
    notebook: Notebook, tmp_path: Path
) -> None:
    notebook.output = ""
    notebook.run(
        "from lightning_bucketddp import BucketDDPMonitor\n"
        f"monitor = BucketDDPMonitor(every_n_steps=1, dirpath={str(tmp_path)!r}, summary=False)\n"
        "trainer = make_trainer('bucketddp')\ntrainer.callbacks.append(monitor)\ntrainer.fit(Regression())"
    )
    assert notebook.output.count("bucketddp: 2 ranks (gloo, started by fork); ") == 1
    html = notebook.run("page = monitor.show()", then="page._repr_html_()")
    assert html.startswith('<iframe srcdoc="&lt;!DOCTYPE html&gt;')
    assert f"{tmp_path}/bucketddp" in html
