"""Bytes <-> objects, nothing else: no socket, no clock, no disk."""
