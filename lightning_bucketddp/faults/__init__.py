"""Watchdog, heartbeats, stragglers: noticing a failed rank, ending the run on all."""
