"""Evaluation on the way: samples that pass the stages forward only, and are in no sum."""
