"""The record of a run: its format, writer and reader, the typical step, and the summary."""
