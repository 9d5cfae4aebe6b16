"""Routed experts: the router, weights of few bits, and what the chosen experts make of a token."""
