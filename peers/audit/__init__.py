"""Verification: sums are checked, answers computed again, and peers that are shown to lie left out."""
