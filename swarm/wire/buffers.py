"""Raw bytes on their way, whoever owns them."""

from __future__ import annotations

from typing import TypeAlias

Buffer: TypeAlias = bytes | bytearray | memoryview
"""Contiguous; memoryviews may be of any item type."""
