"""The one pinned engine: its command line, its process, its entry."""
