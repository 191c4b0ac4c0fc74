"""The type of raw bytes in transit."""

from __future__ import annotations

from typing import TypeAlias

Buffer: TypeAlias = bytes | bytearray | memoryview
"""Contiguous; memoryviews may be of any item type."""
