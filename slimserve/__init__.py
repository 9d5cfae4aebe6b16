"""A profile-registry serving appliance for large language models on hardware people own."""

import os

__version__ = "0.1.0"

BUILD = f"{__version__} in {os.path.dirname(os.path.realpath(__file__))}"
"""what tells this slimserve from another on the same machine"""
