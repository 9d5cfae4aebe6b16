"""A profile-registry serving appliance for large language models on hardware people own."""

__version__ = "0.1.0"
