"""The operator's page and the metrics of engine and appliance in one place: read-only, on loopback."""
