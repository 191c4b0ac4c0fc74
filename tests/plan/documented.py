"""The machines that docs/planning.md describes."""

from __future__ import annotations

from pathlib import Path

PLANNING = Path(__file__).resolve().parents[2] / "docs" / "planning.md"
DEVICES = PLANNING.read_text().partition("```toml\n")[2].partition("```")[0]
