"""What sits in the engine's seats: our operations behind the engine's own signatures, and nothing else.

Each module here is imported when its seat is taken (`quixicore.engine`), in the engine's processes alone.
"""
