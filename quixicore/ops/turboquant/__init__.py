"""TurboQuant: keys and values of a cache in a few bits, in the byte layout of the engine."""
