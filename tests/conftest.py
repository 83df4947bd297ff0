"""Settings for all tests: examples of properties repeat from run to run and have no time limit."""

from hypothesis import settings

settings.register_profile("steady", deadline=None, derandomize=True)
settings.load_profile("steady")
