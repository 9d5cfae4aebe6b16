"""A profile-registry serving appliance for large language models on hardware people own."""
