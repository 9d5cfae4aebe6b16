"""The one pinned engine: its command line, its process, its entry."""

from __future__ import annotations

ENGINE_VERSION = "0.32.0"
