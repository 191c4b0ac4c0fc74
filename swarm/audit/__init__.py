"""Verification: what shows that a peer lied, computed again from what it signed."""
