"""The door: one pure-ASGI middleware between clients and engine, in the engine's own API server process.

A request passes `routes` (is there such a way in, and does it take a key), `keys` (whose is it), `slots` (is there
room), `requests` (what it asks for, and what the profile makes of that), and then the engine. Nothing here imports
the engine: the middleware stands before any ASGI application.
"""
