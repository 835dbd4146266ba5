"""The record of a run's steps: its file format, its writer and reader, the typical step, and the summary."""
