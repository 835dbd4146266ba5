"""Processes that are made in a moment: forked from a server that has imported torch and Lightning once."""

import multiprocessing

PROCESSES = multiprocessing.get_context("forkserver")
# There is one server for all, and it is asked once.
PROCESSES.set_forkserver_preload(["tests.support.preloaded"])
