"""Programs that use Lightning.

Some are scripts that a test starts as a user would. The others hold jobs for `tests.support.ranks.run_on_ranks`, whose
processes import Lightning once for all tests.
"""
